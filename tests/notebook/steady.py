"""Texts that one run and the next write alike, once what differs from run to run is taken out."""

import re

COLOURS = re.compile(r"\x1b\[[0-9;]*m")

CHANGES = (
    (r"\S+/rank-\d+\.log", "LOG"),
    (r"\S*/\d{8}-\d{6}-\w+", "LOGS"),
    (r" on \S+ \((?=CPU|\d+ GPU)", " on HOST ("),
    (r"(ranks? [\d–, ]+) \([^(),]+, (pid \d+, )?(?=cpu|cuda|simulated)", r"\1 (HOST, "),
    (r"└── \S+$", "└── HOST"),
    (r"\b(pid|process) \d+", r"\1 PID"),
    (r"^[0-9a-f]{8}(?=  rank)|(?<= of |ach )[0-9a-f]{8}\b", "CLUSTER"),
    (r"^(CLUSTER  ranks [\d–]+ of )\S+(?=,)", r"\1NOTEBOOK"),
    (r"\bsince \d\d:\d\d", "since TIME"),
    (r"Open MPI v[\d.]+", "MPI"),
    (r"\b\d+ MB\b", "MB"),
    (r"… [\d,]+ lines", "… LINES"),
    (r"\bin \d+\.\d s\b", "in SECONDS"),
    (r"(?<=: )[\d.]+ (s|ms|µs)\b", "SECONDS"),
    (r"(?<=finished, )[\d.]+ (s|ms|µs)$", "SECONDS"),
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r"\bkept \d+ s ago", "kept SECONDS ago"),
    (r"shortest of \d+", "shortest of TIMES"),
    (r"within [\d.]+%", "within PERCENT"),
    (r"In\[\d+\]", "In[N]"),
    (r"<ipython-input-[\w-]+>", "In[N]"),
    # Python 3.12 and later name the value.
    (r"(?<=not JSON compliant): \w+", ""),
)
"""What differs: logs, hosts, processes, versions, memory, time, and the cells' numbers."""

LATE = re.compile(
    r"^[^\n]* · [^\n]*(has waited|has moved no data|has not started|waits in|is at"
    r"|does not answer|still being replaced|% of the time|of its own: the weights differ"
    r"|weights differ in|the same numbers to its reductions)[^\n]*\n?",
    re.MULTILINE,
)
"""A busy machine may say that a rank is late, or its replacement, or why a cell was slow. A fast
one does not judge a short cell, whose results may be wrong on purpose."""


def steady(text: str) -> str:
    text = LATE.sub("", COLOURS.sub("", text))
    for pattern, name in CHANGES:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    return text.strip()
