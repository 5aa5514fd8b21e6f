// A job of Kafka Streams that counts rows by key and hour, and stops after ROWS rows:
// Windows BROKER APPLICATION TOPIC ROWS DIRECTORY.
import java.time.Duration;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.WindowStore;

public class Windows {
  public static void main(String[] arguments) throws Exception {
    CountDownLatch left = new CountDownLatch(Integer.parseInt(arguments[3]));
    Properties settings = new Properties();
    settings.put("bootstrap.servers", arguments[0]);
    settings.put("application.id", arguments[1]);
    settings.put("state.dir", arguments[4]);
    settings.put("default.key.serde", Serdes.StringSerde.class);
    settings.put("default.value.serde", Serdes.StringSerde.class);
    settings.put("auto.offset.reset", "earliest");
    settings.put("session.timeout.ms", 6000);
    StreamsBuilder builder = new StreamsBuilder();
    builder
        .<String, String>stream(arguments[2])
        .groupByKey()
        .windowedBy(TimeWindows.ofSizeWithNoGrace(Duration.ofHours(1)))
        .aggregate(() -> "0", (key, row, rows) -> {
          left.countDown();
          return Integer.toString(Integer.parseInt(rows) + 1);
        }, Materialized.<String, String, WindowStore<Bytes, byte[]>>as("hours"));
    KafkaStreams streams = new KafkaStreams(builder.build(), settings);
    streams.start();
    left.await();
    System.exit(streams.close(Duration.ofSeconds(60)) ? 0 : 1);
  }
}
