"""`moejob run`: a job on this machine, under the contract and by the recovery rules that hold in a cluster.

machine.py knows the machine, launchers.py the processes to start, recovery.py the action after a failure, folder.py and
steps.py the files, display.py the screen; processes.py and supervision.py act. Knows nothing of torch.
"""
