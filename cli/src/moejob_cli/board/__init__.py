"""The page of runs: `moejob board` serves it, `moejob report` writes it as one file. Both only read run folders."""
