# A Spark application on Kubernetes: Spark's own image with Python, statemgr and the query (query.py of the build context).
ARG SPARK=apache/spark:4.2.0-scala2.13-java17-python3-ubuntu

FROM ${SPARK}
ARG STATEMGR=statemgr[s3]
USER root
# the image has Spark and its Python sources; pandas, pyarrow and protobuf are those that statemgr[spark] asks for
RUN pip install --no-cache-dir --only-binary :all: "${STATEMGR}" 'pandas>=2.2,<3' 'pyarrow>=19,<27' 'protobuf>=6,<8'
COPY query.py job.toml /opt/spark/work-dir/
USER spark
