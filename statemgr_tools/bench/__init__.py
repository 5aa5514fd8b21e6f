"""``statemgr bench``: measures statemgr and named references in the same run.

Each case of the table is a function in ``cases/``, registered by its name, that yields :class:`Result` rows. A run
measures the variants of a comparison in turn (:mod:`statemgr_tools.bench.measure`), on state that it generates once
(:mod:`statemgr_tools.bench.states`). It touches only its own work directory and the servers that it starts or is given.
"""
