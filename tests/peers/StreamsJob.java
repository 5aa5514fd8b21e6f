// A job of Kafka Streams, for tests: StreamsJob BROKER APPLICATION TOPIC KIND COUNT.
// It counts rows by key in three kinds of stores, deletes the keys whose row is "0", and ends after COUNT rows.
// Kinds: plain; exactly-once; crash (it dies when its changes are in the changelogs, and before it commits its offsets);
// window and versioned (each with a store of that kind); streams-protocol (its group has the protocol of KIP-1071).
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;
import org.apache.kafka.streams.state.TimestampedKeyValueStore;
import org.apache.kafka.streams.state.TimestampedKeyValueStoreWithHeaders;
import org.apache.kafka.streams.state.ValueAndTimestamp;
import org.apache.kafka.streams.state.ValueTimestampHeaders;
import org.apache.kafka.streams.state.VersionedKeyValueStore;
import org.apache.kafka.streams.state.WindowStore;

public class StreamsJob {
  static String kind;
  static CountDownLatch left;

  static class Count implements Processor<byte[], byte[], Void, Void> {
    KeyValueStore<Bytes, byte[]> plain;
    TimestampedKeyValueStore<Bytes, byte[]> timestamped;
    TimestampedKeyValueStoreWithHeaders<Bytes, byte[]> headers;
    WindowStore<Bytes, byte[]> window;
    VersionedKeyValueStore<Bytes, byte[]> versioned;

    public void init(ProcessorContext<Void, Void> context) {
      plain = context.getStateStore("plain");
      timestamped = context.getStateStore("timestamped");
      headers = context.getStateStore("headers");
      if (kind.equals("window")) window = context.getStateStore("extra");
      if (kind.equals("versioned")) versioned = context.getStateStore("extra");
    }

    public void process(Record<byte[], byte[]> row) {
      Bytes key = Bytes.wrap(row.key());
      byte[] value = null;
      if (!new String(row.value(), StandardCharsets.UTF_8).equals("0")) {
        byte[] before = plain.get(key);
        int rows = before == null ? 0 : Integer.parseInt(new String(before, StandardCharsets.UTF_8));
        value = Integer.toString(rows + 1).getBytes(StandardCharsets.UTF_8);
      }
      RecordHeaders noted = new RecordHeaders();
      noted.add("note", row.value());
      plain.put(key, value);
      timestamped.put(key, value == null ? null : ValueAndTimestamp.make(value, row.timestamp()));
      headers.put(key, value == null ? null : ValueTimestampHeaders.make(value, row.timestamp(), noted));
      if (window != null) window.put(key, row.value(), row.timestamp());
      if (versioned != null) versioned.put(key, row.value(), row.timestamp());
      left.countDown();
    }
  }

  public static void main(String[] arguments) throws Exception {
    kind = arguments[3];
    left = new CountDownLatch(Integer.parseInt(arguments[4]));
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[0]);
    settings.put("application.id", arguments[1]);
    settings.put("state.dir", Files.createTempDirectory("streams").toString());
    settings.put("commit.interval.ms", 3_600_000);
    settings.put("auto.offset.reset", "earliest");
    if (kind.equals("streams-protocol")) {
      settings.put("group.protocol", "streams");
      settings.put("commit.interval.ms", 200);
    } else {
      settings.put("session.timeout.ms", 6000);
      settings.put("heartbeat.interval.ms", 2000);
    }
    if (kind.equals("exactly-once")) {
      settings.put("processing.guarantee", "exactly_once_v2");
      settings.put("commit.interval.ms", 200);
    }
    Topology topology = new Topology();
    topology.addSource("rows", new ByteArrayDeserializer(), new ByteArrayDeserializer(), arguments[2]);
    topology.addProcessor("count", Count::new, "rows");
    topology.addStateStore(
        Stores.keyValueStoreBuilder(Stores.persistentKeyValueStore("plain"), Serdes.Bytes(), Serdes.ByteArray()), "count");
    topology.addStateStore(
        Stores.timestampedKeyValueStoreBuilder(
            Stores.persistentTimestampedKeyValueStore("timestamped"), Serdes.Bytes(), Serdes.ByteArray()),
        "count");
    topology.addStateStore(
        Stores.timestampedKeyValueStoreWithHeadersBuilder(
            Stores.persistentTimestampedKeyValueStoreWithHeaders("headers"), Serdes.Bytes(), Serdes.ByteArray()),
        "count");
    Duration hour = Duration.ofHours(1);
    if (kind.equals("window"))
      topology.addStateStore(
          Stores.windowStoreBuilder(
              Stores.persistentWindowStore("extra", hour, hour, false), Serdes.Bytes(), Serdes.ByteArray()),
          "count");
    if (kind.equals("versioned"))
      topology.addStateStore(
          Stores.versionedKeyValueStoreBuilder(
              Stores.persistentVersionedKeyValueStore("extra", hour), Serdes.Bytes(), Serdes.ByteArray()),
          "count");
    KafkaStreams streams = new KafkaStreams(topology, settings);
    streams.start();
    left.await();
    if (kind.equals("crash")) {
      Thread.sleep(1500); // the producer sends what it has
      Runtime.getRuntime().halt(9);
    }
    if (!streams.close(Duration.ofSeconds(60))) Runtime.getRuntime().halt(1);
    System.exit(0);
  }
}
