"""``statemgr bench``: measures statemgr and named references in the same run.

Each case of the table is a function in ``cases/``, registered by its name; it yields :class:`Result` rows.
What is compared is measured in the same run, in turn (:mod:`statemgr_tools.bench.measure`), on state that is
generated once (:mod:`statemgr_tools.bench.states`). Touches its own work directory, and
the servers that it starts or is given.
"""
