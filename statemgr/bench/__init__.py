"""Measurements of the product beside named references: ``statemgr bench``.

Each case of the table is a function in a ``cases_*`` file, registered by its name; it yields :class:`Result` rows.
What is compared is measured in the same run, in turn (:mod:`statemgr.bench.measure`), on state that is generated once
(:mod:`statemgr.bench.states`). Touches its own work directory, and the servers that it starts or is given.
"""
