"""Worker processes, which compute for the sites of a simulation.

dealing.py      which worker holds which sites, and on which device
pool.py         the processes, seen by the process that starts them
commands.py     what workers are asked, beside the tasks of methods
answers.py      what a worker answers
process.py      the program of a worker
"""
