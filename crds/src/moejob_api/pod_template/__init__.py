"""Pod templates of a job: the fields that they may have, and what is wrong with one.

The definition of a job holds a template as one object of any content, for the API server's schema of a pod is ten times
as long as that of a job. So the fields that are allowed stand here, and whatever is not here is refused.
"""
