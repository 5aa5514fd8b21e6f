# A Spark application on Kubernetes: Spark's own image, with statemgr, a Python for it, and query.py and job.toml of the
# build context.
ARG SPARK=apache/spark:4.2.0-scala2.13-java17-ubuntu
ARG UV=ghcr.io/astral-sh/uv:0.13

FROM ${UV} AS uv

# The Python of Spark's images is 3.10, which is too old: uv installs another one.
FROM ${SPARK} AS build
ARG STATEMGR=statemgr[s3]
ARG PYTHON=3.13
COPY --from=uv /uv /usr/local/bin/uv
USER root
ENV UV_PYTHON_INSTALL_DIR=/opt/python
# the image has Spark and its Python sources; pandas, pyarrow and protobuf are those that statemgr[spark] asks for
RUN uv venv --managed-python --python ${PYTHON} /opt/statemgr \
    && uv pip install --python /opt/statemgr --no-cache --only-binary :all: --compile-bytecode \
        "${STATEMGR}" 'pandas>=2.2,<3' 'pyarrow>=19,<27' 'protobuf>=6,<8'

FROM ${SPARK}
COPY --from=build /opt/python /opt/python
COPY --from=build /opt/statemgr /opt/statemgr
# `statemgr init` writes a job.toml that only its owner may read
COPY --chown=spark:spark query.py job.toml /opt/spark/work-dir/
ENV PYSPARK_PYTHON=/opt/statemgr/bin/python PYSPARK_DRIVER_PYTHON=/opt/statemgr/bin/python
USER spark
