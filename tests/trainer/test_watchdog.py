"""Who is named when a job stands still, and who stays so that others can name it (O21)."""

from jaxtron.resilience.watchdog import farewell, report

STUCK = {
    0: [9, "waiting for the result of step 3", "a"],
    1: [8, "reading the batch of step 3", "b"],
    2: [9, "waiting for the result of step 3", "c"],
}
ALIKE = {process: [9, "waiting for the result of step 3", "a"] for process in range(3)}


def test_the_report_names_who_is_waited_for_and_where():
    text = report(STUCK, 0, 20.0)
    assert "process 0 has been waiting for the result of step 3" in text
    assert "the job waits for process 1 on b, reading the batch of step 3" in text
    assert "no process is behind another" in report(ALIKE, 0, 20.0)


def test_who_is_waited_for_stays_until_the_others_have_looked():
    """They look every quarter of the time limit, at most every 10 s."""
    assert farewell(STUCK, 1, 20.0) > 5
    assert farewell(STUCK, 1, 1800.0) > 10
    assert farewell(STUCK, 2, 20.0) == 0


def test_the_process_with_the_coordination_service_stays_for_questions():
    assert farewell(STUCK, 0, 20.0) > 0
    assert farewell(ALIKE, 0, 20.0) > 0
    assert farewell(ALIKE, 1, 20.0) == 0
