"""`moejob run`: a job on this machine, under the contract and by the recovery rules that hold in a cluster.

machine.py says what is here, launchers.py what is started, recovery.py what is done when something fails, folder.py and
steps.py what is on disk, display.py what is shown; processes.py and supervision.py act. Knows nothing of torch.
"""
