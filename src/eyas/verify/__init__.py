"""`eyas verify`: is a store what it claims to be?

    report = verify(store, corpus=corpus, logits="http://localhost:30000")
    report.check()

run        `verify`: all checks, cheapest first
report     `VerifyReport`: what they found
against    values: sampled rows recomputed by transformers
logits     values: what `last` predicts against a server's prompt log-probabilities; asks the server
audit      the verdict on one row of that
sampling   which rows, and the precision of their states
"""

from eyas.verify.against import Comparison
from eyas.verify.audit import Audit, AuditKind, AuditProblem
from eyas.verify.report import VerifyReport
from eyas.verify.run import verify
from eyas.verify.sampling import sample_rows

__all__ = ["Audit", "AuditKind", "AuditProblem", "Comparison", "VerifyReport", "sample_rows", "verify"]
