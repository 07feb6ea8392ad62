"""Worker processes: for the sites of a simulation, and for predictions.

worker_process.py      one process, seen by the process that starts it
process.py             the program of a worker
answering.py           its loop of requests and replies
events.py              what it reports
dealing.py             how many workers there are, with which sites, on which devices

pool.py                the processes of a simulation
commands.py            what they are asked, beside the tasks of methods
answers.py             what they answer

predictions.py         the processes that predict notes
prediction_answers.py  what they are asked, and what they answer
"""
