"""Parts of a run, built from the job: each module builds one of those that rank.py puts together.

Only this room and rank.py know the RankContext. A builder takes it apart and gives each part the values that it needs:
what a part does stands in the part's own room. Builders share the context because nearly each needs the job, the groups
and a word of the first rank; as single arguments these would be six or more a function.
"""
