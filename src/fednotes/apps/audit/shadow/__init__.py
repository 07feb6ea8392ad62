"""Shadow models, trained at the audited site alone on random halves of its data.

models.py     trains them and has them score what they may remember
subject.py    the interface of a site's data
mentions.py   a site with annotated notes
notes.py      a site with notes that are not annotated
secrets.py    names and numbers that are planted into the notes

Other kinds of sites provide their own subject (`SiteKind.make_audit_subject`), as
patients do.
"""
