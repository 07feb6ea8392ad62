"""Worker processes: for the sites of a simulation, and for predictions.

worker_process.py       one process, seen by the process that starts it
child_process.py        the way to a process of this machine
cluster.py              the way to a process on a node of a Ray cluster
actor.py                the other end of it, on the node
process.py              the program of a worker
answering.py            its loop of requests and replies
events.py               what it reports
dealing.py              how many workers there are, with which sites, on which devices

pool.py                 the processes of a simulation
worker_messages.py      what they are asked, beside the tasks of methods
worker.py               what they do and reply

predictions.py          the processes that predict notes
prediction_messages.py  what they are asked
prediction_worker.py    what they do and reply
"""
