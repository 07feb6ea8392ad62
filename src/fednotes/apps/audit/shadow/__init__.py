"""Shadow models, trained at the audited site alone on random halves of its data.

models.py     trains them and has them score what they may remember
subject.py    what a site must offer for that
mentions.py   a site with annotated notes
notes.py      a site with notes that are not annotated
secrets.py    names and numbers that are planted into the notes

Another kind of sites brings a subject of its own (`SiteKind.audit_subject`), as
patients do.
"""
