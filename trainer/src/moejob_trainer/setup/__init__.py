"""Parts of a run, built from the job: each module builds one of those that rank.py puts together."""
