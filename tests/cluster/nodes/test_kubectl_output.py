"""Golden files of what kubectl shows hold what stays the same, and nothing that does not."""

from __future__ import annotations

import pytest

from cluster.nodes.kubectl_output import normalise_description, normalise_table

TABLE = """\
NAME     PHASE     STEP     SCORE   SPEED       ETA   AGE
steady   Running   17/100   3.355   570 tok/s         66s
done     Succeeded 100/100  3.1     570 tok/s   5s    5m
"""
DESCRIPTION = """\
Name:         steady
Metadata:
  UID:  ff8c3d74-b7f6-493d-b6e2-6aba4855da14
Status:
  Conditions:
    Message:  step 6 is saved
  Display:
    Eta:
    Step:  {step}/100
  Goodput:
    Lost Seconds:        0
    Productive Seconds:  2.2
  Progress:
    Step:         {step}
    Total Steps:  100
Events:
  Type    Reason        Age   From                 Message
  ----    ------        ----  ----                 -------
  Normal  ClaimPending  66s   moejob.dev/operator  claim is not bound
  Normal  Running       65s   moejob.dev/operator  every trainer pod runs
"""


def test_a_table_keeps_its_columns_and_loses_what_moves() -> None:
    assert normalise_table(TABLE).splitlines() == [
        "NAME     PHASE       STEP      SCORE     SPEED     ETA     AGE",
        "steady   Running     <n>/100   <score>   <speed>           <age>",
        "done     Succeeded   100/100   <score>   <speed>   <eta>   <age>",
    ]


@pytest.mark.parametrize(("step", "said"), [(17, "<n>"), (100, "100")])
def test_a_description_keeps_its_fields_and_loses_what_moves(step: int, said: str) -> None:
    told = normalise_description(DESCRIPTION.format(step=step))
    assert f"    Step:  {said}/100\n" in told
    assert f"    Step:         {said}\n    Total Steps:  100" in told
    assert "UID:  <uid>\n" in told
    assert "Message:  step <n> is saved\n" in told
    assert "Lost Seconds:        0\n    Productive Seconds:  <productive seconds>\n" in told
    assert told.endswith(
        "Events:\n"
        "Type     Reason    Age     From                  Message\n"
        "Normal   Running   <age>   moejob.dev/operator   every trainer pod runs"
    )
