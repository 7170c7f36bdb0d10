"""Jobs from and to text: YAML read as kubectl reads it, every mistake in one clear sentence."""

from moejob_api.documents.reading import parse_job, read_file, read_job
from moejob_api.documents.writing import dump_job, yaml_text

__all__ = ["dump_job", "parse_job", "read_file", "read_job", "yaml_text"]
