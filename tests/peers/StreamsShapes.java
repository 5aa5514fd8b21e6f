// Applications of the DSL of Kafka Streams, for tests: StreamsShapes BROKER APPLICATION TOPIC KIND COUNT [FILE].
// Keys and values are strings. It writes what its stores of windows have to FILE, and ends when COUNT rows of TOPIC (and of TOPIC-left of a join) are processed,
// and no row waits in its input or in a topic of its own.
// Kinds: group (count by the value, through a repartition topic); suppress (a named suppression of a named count);
// join (a named foreign-key join: the values of TOPIC-left are keys of TOPIC); hopping (windows whose changelog is only
// compacted); versioned (a versioned table whose changelog has no lag of compaction); table (a source table under
// topology.optimization=all, and a count by key of the rows of TOPIC-left); windows (counts in tumbling windows, whose
// results are suppressed, in hopping and sliding ones, and in sessions).
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Named;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.SlidingWindows;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TableJoined;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.Window;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlySessionStore;
import org.apache.kafka.streams.state.ReadOnlyWindowStore;
import org.apache.kafka.streams.state.SessionStore;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.WindowStore;

public class StreamsShapes {
  static final Set<String> keys = new ConcurrentSkipListSet<>();

  public static void main(String[] arguments) throws Exception {
    String topic = arguments[2];
    Set<String> inputs =
        Set.of("join", "table").contains(arguments[3]) ? Set.of(topic, topic + "-left") : Set.of(topic);
    CountDownLatch left = new CountDownLatch(Integer.parseInt(arguments[4]));
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[0]);
    settings.put("application.id", arguments[1]);
    settings.put("state.dir", Files.createTempDirectory("streams").toString());
    settings.put("default.key.serde", Serdes.StringSerde.class);
    settings.put("default.value.serde", Serdes.StringSerde.class);
    settings.put("auto.offset.reset", "earliest");
    settings.put("commit.interval.ms", 200);
    settings.put("session.timeout.ms", 6000);
    settings.put("heartbeat.interval.ms", 2000);
    settings.put("topology.optimization", "all");
    StreamsBuilder builder = new StreamsBuilder();
    Duration minute = Duration.ofMinutes(1);
    Duration hour = Duration.ofHours(1);
    switch (arguments[3]) {
      case "group":
        builder.<String, String>stream(topic)
            .peek((key, value) -> left.countDown())
            .groupBy((key, value) -> value, Grouped.as("by-value"))
            .count(Materialized.as("totals"));
        break;
      case "suppress":
        builder.<String, String>stream(topic)
            .peek((key, value) -> left.countDown())
            .groupByKey()
            .count(Materialized.as("totals"))
            .suppress(
                Suppressed.<String>untilTimeLimit(Duration.ofDays(1), Suppressed.BufferConfig.maxRecords(100_000))
                    .withName("late"));
        break;
      case "join":
        KTable<String, String> right =
            builder.<String, String>stream(topic).peek((key, value) -> left.countDown()).toTable(Materialized.as("right"));
        builder.<String, String>stream(topic + "-left")
            .peek((key, value) -> left.countDown())
            .toTable(Materialized.as("left"))
            .join(right, value -> value, (one, other) -> one + other, TableJoined.as("fk"), Materialized.as("joined"));
        break;
      case "hopping":
        builder.<String, String>stream(topic)
            .peek((key, value) -> left.countDown())
            .groupByKey()
            .windowedBy(TimeWindows.ofSizeWithNoGrace(minute).advanceBy(Duration.ofSeconds(20)))
            .count(
                Materialized.<String, Long, WindowStore<Bytes, byte[]>>as("hops")
                    .withLoggingEnabled(Map.of("cleanup.policy", "compact")));
        break;
      case "versioned":
        builder.<String, String>stream(topic)
            .peek((key, value) -> left.countDown())
            .toTable(
                Materialized.<String, String>as(Stores.persistentVersionedKeyValueStore("versions", minute))
                    .withLoggingEnabled(Map.of("min.compaction.lag.ms", "0")));
        break;
      case "windows":
        KGroupedStream<String, String> rows =
            builder
                .<String, String>stream(topic)
                .peek((key, value) -> keys.add(key))
                .peek((key, value) -> left.countDown())
                .groupByKey();
        rows.windowedBy(TimeWindows.ofSizeAndGrace(minute, minute))
            .count(
                Materialized.<String, Long, WindowStore<Bytes, byte[]>>as("tumbling")
                    .withKeySerde(Serdes.String())
                    .withValueSerde(Serdes.Long())
                    .withRetention(hour))
            .suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded()).withName("late"));
        rows.windowedBy(TimeWindows.ofSizeWithNoGrace(minute).advanceBy(Duration.ofSeconds(20)))
            .count(
                Materialized.<String, Long, WindowStore<Bytes, byte[]>>as("hopping")
                    .withCachingDisabled()
                    .withRetention(hour));
        rows.windowedBy(SlidingWindows.ofTimeDifferenceAndGrace(minute, minute))
            .count(Materialized.<String, Long, WindowStore<Bytes, byte[]>>as("sliding").withRetention(hour));
        rows.windowedBy(SessionWindows.ofInactivityGapAndGrace(minute, minute))
            .count( // a query of a cached store would look at every segment until the end of time
                Materialized.<String, Long, SessionStore<Bytes, byte[]>>as("sessions")
                    .withCachingDisabled()
                    .withRetention(hour));
        break;
      default:
        builder.<String, String>table(topic, Materialized.as("names"))
            .toStream(Named.as("changes"))
            .foreach((key, value) -> left.countDown());
        builder.<String, String>stream(topic + "-left")
            .peek((key, value) -> left.countDown())
            .groupByKey()
            .count(Materialized.as("totals"));
    }
    KafkaStreams streams = new KafkaStreams(builder.build(settings), settings);
    streams.setUncaughtExceptionHandler(
        (StreamsUncaughtExceptionHandler)
            error -> {
              error.printStackTrace();
              Runtime.getRuntime().halt(1);
              return null;
            });
    streams.start();
    left.await();
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", arguments[0]))) {
      while (!StreamsDescribed.read(admin, arguments[1], inputs, 0)) Thread.sleep(50);
    }
    if (arguments.length > 5) Files.write(Path.of(arguments[5]), content(streams));
    if (!streams.close(Duration.ofSeconds(60))) Runtime.getRuntime().halt(1);
    System.exit(0);
  }

  /** What the stores of the kind windows have: store, key, start, end and value of each window, divided by tabs. */
  static List<String> content(KafkaStreams streams) {
    List<String> found = new ArrayList<>();
    for (String store : List.of("tumbling", "hopping", "sliding")) {
      ReadOnlyWindowStore<String, Long> of =
          streams.store(StoreQueryParameters.fromNameAndType(store, QueryableStoreTypes.windowStore()));
      lines(store, of.all(), found);
    }
    ReadOnlySessionStore<String, Long> sessions =
        streams.store(StoreQueryParameters.fromNameAndType("sessions", QueryableStoreTypes.sessionStore()));
    for (String key : keys) lines("sessions", sessions.fetch(key), found);
    return found;
  }

  static void lines(String store, KeyValueIterator<Windowed<String>, Long> windows, List<String> found) {
    try (windows) {
      while (windows.hasNext()) {
        KeyValue<Windowed<String>, Long> one = windows.next();
        Window window = one.key.window();
        found.add(String.join("\t", store, one.key.key(), "" + window.start(), "" + window.end(), "" + one.value));
      }
    }
  }
}
