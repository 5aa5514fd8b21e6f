// Builds a topology of Kafka Streams from the steps of a description in JSON, for StreamsDescribed.
import com.fasterxml.jackson.databind.JsonNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.ForeachAction;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Named;
import org.apache.kafka.streams.kstream.Repartitioned;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.SlidingWindows;
import org.apache.kafka.streams.kstream.StreamJoined;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TableJoined;
import org.apache.kafka.streams.kstream.TimeWindowedKStream;
import org.apache.kafka.streams.kstream.TimeWindows;

import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.StoreBuilder;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.ValueAndTimestamp;
import org.apache.kafka.streams.state.ValueTimestampHeaders;

@SuppressWarnings({"unchecked", "rawtypes"})
class StreamsTopology {
  final Map<String, String> kinds = new HashMap<>(); // store that the description names → kv, window, session or versioned
  final List<String> unnamed = new ArrayList<>(); // kinds of the stores that Kafka Streams names
  private final StreamsBuilder builder = new StreamsBuilder();
  private final Map<String, Object> made = new HashMap<>(); // step → stream or table
  private final Set<String> topics = new TreeSet<>();
  private final ForeachAction<Object, Object> seen;

  StreamsTopology(JsonNode steps, ForeachAction<Object, Object> seen) {
    this.seen = seen;
    for (JsonNode step : steps) made.put(step.get("as").asText(), make(step));
  }

  Topology build(Properties settings) {
    return builder.build(settings);
  }

  /** The topics whose offsets it commits. */
  Set<String> topics() {
    return topics;
  }

  private Object make(JsonNode step) {
    String topic = text(step, "topic");
    switch (step.get("op").asText()) {
      case "stream":
        topics.add(topic);
        return builder.stream(topic, Consumed.with(Serdes.String(), Serdes.String())).peek(seen::apply);
      case "table":
        topics.add(topic);
        KTable<String, String> table =
            (KTable) builder.table(topic, Consumed.with(Serdes.String(), Serdes.String()), stored(step, "kv", Serdes.String()));
        table.toStream().foreach(seen::apply);
        return table;
      case "global-table":
        kinds.put(text(step, "store"), "kv");
        return builder.globalTable(topic, Consumed.with(Serdes.String(), Serdes.String()), Materialized.as(text(step, "store")));
      case "map":
        return stream(step, "of").mapValues(value -> value == null ? null : value + text(step, "add"));
      case "repartition":
        return stream(step, "of").selectKey((key, value) -> "g" + value).repartition(Repartitioned.as(text(step, "name")));
      case "to-table":
        return stream(step, "of").toTable(stored(step, "kv", Serdes.String()));
      case "filter":
        return ((KTable<String, String>) table(step, "of")).filter((key, value) -> !value.endsWith("0"), stored(step, "kv", Serdes.String()));
      case "count-table":
        return table(step, "of")
            .groupBy((key, value) -> KeyValue.pair("g" + value, value), grouped(step))
            .count(stored(step, "kv", Serdes.Long()));
      case "suppress":
        return suppress(step);
      case "join":
        return join(step);
      case "processor":
        return processor(step);
      default:
        return aggregate(step);
    }
  }

  // --- stores -----------------------------------------------------------------------------------------------

  private Materialized stored(JsonNode step, String kind, Serde values) {
    String name = text(step, "store");
    Materialized stored;
    if (step.has("versioned")) {
      kind = "versioned";
      stored = Materialized.as(Stores.persistentVersionedKeyValueStore(name, Duration.ofMillis(step.get("versioned").asLong())));
    } else if (step.has("plain")) {
      stored = Materialized.as(Stores.persistentKeyValueStore(name));
    } else {
      stored = name == null ? Materialized.with(Serdes.String(), values) : Materialized.as(name);
    }
    if (name == null) unnamed.add(kind);
    else kinds.put(name, kind);
    stored.withKeySerde(Serdes.String()).withValueSerde(values);
    if (step.has("memory")) stored.withStoreType(Materialized.StoreType.IN_MEMORY);
    if (step.has("uncached")) stored.withCachingDisabled();
    if (step.has("unlogged")) stored.withLoggingDisabled();
    if (step.has("retention")) stored.withRetention(Duration.ofMillis(step.get("retention").asLong()));
    if (step.has("changelog")) {
      Map<String, String> settings = new HashMap<>();
      step.get("changelog").properties().forEach(one -> settings.put(one.getKey(), one.getValue().asText()));
      stored.withLoggingEnabled(settings);
    }
    return stored;
  }

  private Grouped grouped(JsonNode step) {
    Grouped grouped = Grouped.with(Serdes.String(), Serdes.String());
    return step.has("group") ? grouped.withName(text(step, "group")) : grouped;
  }

  // --- aggregations -----------------------------------------------------------------------------------------

  private Object aggregate(JsonNode step) {
    KStream<String, String> of = stream(step, "of");
    KGroupedStream<String, String> groups =
        "value".equals(text(step, "by"))
            ? of.groupBy((key, value) -> "g" + value, grouped(step))
            : of.groupByKey(grouped(step));
    if (step.has("gap")) {
      Duration gap = millis(step, "gap");
      SessionWindows windows =
          step.has("grace") ? SessionWindows.ofInactivityGapAndGrace(gap, millis(step, "grace")) : SessionWindows.ofInactivityGapWithNoGrace(gap);
      return groups.windowedBy(windows).count(stored(step, "session", Serdes.Long()));
    }
    if (step.has("size")) return windowed(step, groups);
    switch (step.get("op").asText()) {
      case "count":
        return groups.count(stored(step, "kv", Serdes.Long()));
      case "max":
        return groups.reduce((one, other) -> one.compareTo(other) > 0 ? one : other, stored(step, "kv", Serdes.String()));
      default:
        return groups.aggregate(() -> 0L, (key, value, sum) -> sum + value.length(), stored(step, "kv", Serdes.Long()));
    }
  }

  private Object windowed(JsonNode step, KGroupedStream<String, String> groups) {
    Duration size = millis(step, "size"), grace = step.has("grace") ? millis(step, "grace") : Duration.ZERO;
    TimeWindowedKStream<String, String> windows;
    if (step.has("sliding")) {
      windows = groups.windowedBy(SlidingWindows.ofTimeDifferenceAndGrace(size, grace));
    } else {
      TimeWindows of = TimeWindows.ofSizeAndGrace(size, grace);
      windows = groups.windowedBy(step.has("advance") ? of.advanceBy(millis(step, "advance")) : of);
    }
    if (step.get("op").asText().equals("max"))
      return windows.reduce((one, other) -> one.compareTo(other) > 0 ? one : other, stored(step, "window", Serdes.String()));
    return windows.count(stored(step, "window", Serdes.Long()));
  }

  private Object suppress(JsonNode step) {
    KTable of = table(step, "of");
    Suppressed suppressed =
        step.has("until-closed")
            ? Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded())
            : Suppressed.untilTimeLimit(Duration.ofDays(1), Suppressed.BufferConfig.maxRecords(100_000));
    return of.suppress(step.has("name") ? suppressed.withName(text(step, "name")) : suppressed);
  }

  // --- joins ------------------------------------------------------------------------------------------------

  private Object join(JsonNode step) {
    switch (text(step, "kind")) {
      case "table-table":
        return table(step, "of").join(table(step, "with"), (one, other) -> "" + one + other, stored(step, "kv", Serdes.String()));
      case "foreign-key":
        Materialized stored = stored(step, "kv", Serdes.String());
        KTable<String, String> left = table(step, "of"), right = table(step, "with");
        return step.has("name")
            ? left.join(right, StreamsTopology::foreign, (one, other) -> one + other, TableJoined.as(text(step, "name")), stored)
            : left.join(right, StreamsTopology::foreign, (one, other) -> one + other, stored);
      case "stream-table":
        return stream(step, "of").join(table(step, "with"), (one, other) -> "" + one + other);
      case "stream-global":
        return stream(step, "of")
            .join((org.apache.kafka.streams.kstream.GlobalKTable<String, String>) made.get(text(step, "with")), (key, value) -> key, (one, other) -> one + other);
      default:
        StreamJoined<String, String, String> named = StreamJoined.with(Serdes.String(), Serdes.String(), Serdes.String());
        if (step.has("name")) named = named.withName(text(step, "name"));
        if (step.has("store")) named = named.withStoreName(text(step, "store"));
        JoinWindows within = JoinWindows.ofTimeDifferenceWithNoGrace(millis(step, "size"));
        return step.has("outer")
            ? stream(step, "of").outerJoin(stream(step, "with"), (one, other) -> one + other, within, named)
            : stream(step, "of").join(stream(step, "with"), (one, other) -> one + other, within, named);
    }
  }

  // --- the processor API ------------------------------------------------------------------------------------

  /** Counts rows by key in a store of each format of values. */
  private Object processor(JsonNode step) {
    String name = text(step, "store"), format = text(step, "format");
    StoreBuilder<?> store =
        switch (format) {
          case "headers" -> Stores.timestampedKeyValueStoreWithHeadersBuilder(
              Stores.persistentTimestampedKeyValueStoreWithHeaders(name), Serdes.String(), Serdes.Long());
          case "timestamped" -> Stores.timestampedKeyValueStoreBuilder(
              Stores.persistentTimestampedKeyValueStore(name), Serdes.String(), Serdes.Long());
          default -> Stores.keyValueStoreBuilder(
              step.has("lru") ? Stores.lruMap(name, step.get("lru").asInt()) : Stores.persistentKeyValueStore(name), Serdes.String(), Serdes.Long());
        };
    kinds.put(name, "kv");
    builder.addStateStore(step.has("cached") ? store.withCachingEnabled() : store);
    stream(step, "of").process(() -> new Count(name, format), Named.as(step.get("as").asText() + "-processor"), name);
    return null;
  }

  private record Count(String name, String format, KeyValueStore[] store) implements Processor<String, String, Void, Void> {
    Count(String name, String format) {
      this(name, format, new KeyValueStore[1]);
    }

    public void init(ProcessorContext<Void, Void> context) {
      store[0] = context.getStateStore(name);
    }

    public void process(Record<String, String> row) {
      Object before = store[0].get(row.key());
      if (row.value() == null) {
        store[0].put(row.key(), null);
        return;
      }
      switch (format) {
        case "headers" -> {
          Long rows = before == null ? 0L : ((ValueTimestampHeaders<Long>) before).value();
          RecordHeaders noted = new RecordHeaders();
          noted.add("note", new byte[] {1});
          store[0].put(row.key(), ValueTimestampHeaders.make(rows + 1, row.timestamp(), noted));
        }
        case "timestamped" -> {
          Long rows = before == null ? 0L : ((ValueAndTimestamp<Long>) before).value();
          store[0].put(row.key(), ValueAndTimestamp.make(rows + 1, row.timestamp()));
        }
        default -> store[0].put(row.key(), before == null ? 1L : (Long) before + 1);
      }
    }
  }

  // ----------------------------------------------------------------------------------------------------------

  private KStream<String, String> stream(JsonNode step, String field) {
    Object of = made.get(text(step, field));
    return of instanceof KTable ? ((KTable<String, String>) of).toStream() : (KStream<String, String>) of;
  }

  /** The key that the value of a row names. */
  private static String foreign(String value) {
    return "k\u00e9-" + value.substring(1);
  }

  private KTable table(JsonNode step, String field) {
    return (KTable) made.get(text(step, field));
  }

  private static String text(JsonNode step, String field) {
    return step.has(field) ? step.get(field).asText() : null;
  }

  private static Duration millis(JsonNode step, String field) {
    return Duration.ofMillis(step.get(field).asLong());
  }
}
