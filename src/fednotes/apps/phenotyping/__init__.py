"""Phenotyping of patients in two stages, after Liu, Dligach and Miller 2019.

From files to patients, in reading order for newcomers:

    cohort         patients as bags of concepts with labels, and their division
    tables         tables of hospitals, one row per line, and reports of damaged rows
    codes          billing codes, their categories, and the outputs of stage 1
    code_tables    the codes of MIMIC-III, OMOP, CodiEsp and tables of a site's own
    labels         labels of phenotypes, from tables
    obesity        the i2b2 2008 obesity challenge
    patient_notes  the notes of patients, one at a time, for a saved model
    gold           the labels that a saved model is scored on
    words          the words of terms and texts
    dictionary     terms of concepts, from the UMLS, ontologies or tables
    context        negation, family and hypothesis
    concepts       the concepts of a dictionary in notes
    ctakes         concepts that cTAKES found
    synthetic      generated patients
    job_tables     the tables of a job on patients
    features       notes as bags of concepts, or as vectors of an encoder
    site_files     the files of one site
    data_kind      the sites of a job: read, split, dealt

From patients to models:

    dan            the deep averaging network of stage 1
    classifiers    the linear classifiers of stage 2
    config         the settings
    counting       what sites agree on before training
    stages         what a site computes in each stage
    site           the tasks of a site
    two_stage      the method: Algorithm 1 of the paper
    phenotyper     the saved model
    predict        predictions and scores of a saved model
    model          the same, as used by fednotes' other commands

Around a run: `agreement` (what sites tell each other), `site_counts`, `hints`,
`compare_patients`, `shadow` (the audit) and `sklearn_export`.
"""
