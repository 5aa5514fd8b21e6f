"""Two jobs: one keeps the newest exchange rates, and a stream of orders looks them up.

``python examples/spark/enrich.py --broker localhost:9092``
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from spark_integration import StatefulQuery, StateTable
from statemgr import JobConfig


def newest(batches, stores, context):
    """Keeps the newest rate of each currency; yields nothing."""
    for batch in batches:
        names, rates = (batch.column(name).to_pylist() for name in ("currency", "rate"))
        stores["rates"].put_many(list(zip(names, rates, strict=True)))
    yield from ()


def rates(spark: SparkSession, broker: str, topic: str, config: JobConfig) -> StatefulQuery:
    """The job of the rates. The store's keys are strings, and its values whole numbers: cents for one unit."""

    def rows(starting_offsets: str) -> DataFrame:
        return stream(spark, broker, topic, starting_offsets, "currency string, rate bigint")

    return StatefulQuery(config).input(rows).key_by("currency").process(newest, "currency string")


def priced(spark: SparkSession, broker: str, topic: str, table: StateTable) -> DataFrame:
    """The orders with their rate, which is null for a currency that has none: order, currency, amount, rate, cents."""

    def enrich(batches):
        for batch in batches:
            yield batch.append_column("rate", table.lookup(batch.column("currency")))

    columns = "order bigint, currency string, amount bigint"
    orders = stream(spark, broker, topic, "earliest", columns)
    return orders.mapInArrow(enrich, f"{columns}, rate bigint").withColumn("cents", F.expr("amount * rate"))


def stream(spark: SparkSession, broker: str, topic: str, starting_offsets: str, columns: str) -> DataFrame:
    """Rows of a topic, from JSON."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", broker)
        .option("subscribe", topic)
        .option("startingOffsets", starting_offsets)
        .load()
        .select(F.from_json(F.col("value").cast("string"), columns).alias("row"))
        .select("row.*")
    )


def main(local) -> None:
    """Send a few rows, and print what comes out."""
    config = local.config("rates", stores__rates__key__serde="string", stores__rates__value__serde="integer")
    rates_topic, orders_topic = local.topic("rates"), local.topic("orders")
    local.send(rates_topic, [{"currency": "EUR", "rate": 108}, {"currency": "GBP", "rate": 126}])
    keeping = (
        rates(local.spark, local.broker, rates_topic, config)
        .writeStream.foreachBatch(lambda df, sequence: None)
        .start()
    )
    keeping.processAllAvailable()
    local.send(
        orders_topic, [{"order": 1, "currency": "EUR", "amount": 20}, {"order": 2, "currency": "XXX", "amount": 3}]
    )
    query = (
        priced(local.spark, local.broker, orders_topic, StateTable(config))
        .writeStream.foreachBatch(lambda df, batch: df.show())
        .start()
    )
    query.processAllAvailable()
    query.stop()
    keeping.stop()


if __name__ == "__main__":
    from local import Local

    main(Local.from_arguments("enrich"))
