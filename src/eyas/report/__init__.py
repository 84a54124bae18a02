"""`eyas report`: one self-contained HTML page for a whole run.

places.py                          which files belong to the run
logs.py                            run logs, whatever their lines hold
extraction.py training.py evaluations.py    what these logs and files tell
scales.py svg.py                   plots
data_sections.py draft_sections.py what the page says, and what it says is missing
page.py templates/                 the HTML
run.py                             the verb
"""

from eyas.report.run import ReportSummary, write_report

__all__ = ["ReportSummary", "write_report"]
