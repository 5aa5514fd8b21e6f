// Runs applications of Kafka Streams that are described in JSON, for tests. Each line of the standard input is an
// application, and each line of the output is what its stores had when it stopped, as it says itself (interactive
// queries). tests/peers/streams.py documents the description. Keys and values are strings, and counts are longs.
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.concurrent.atomic.AtomicLong;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.CloseOptions;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StoreQueryParameters;
import org.apache.kafka.streams.Topology;
import org.apache.kafka.streams.TopologyDescription;
import org.apache.kafka.streams.errors.InvalidStateStoreException;
import org.apache.kafka.streams.kstream.Window;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.query.StateQueryRequest;
import org.apache.kafka.streams.query.VersionedKeyQuery;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.QueryableStoreTypes;
import org.apache.kafka.streams.state.ReadOnlySessionStore;
import org.apache.kafka.streams.state.VersionedRecord;

public class StreamsDescribed {
  static final ObjectMapper JSON = new ObjectMapper();
  static final Map<String, String> directories = new HashMap<>();

  public static void main(String[] arguments) throws Exception {
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
    for (String line = lines.readLine(); line != null; line = lines.readLine()) {
      Map<String, Object> said;
      try {
        said = run(JSON.readTree(line));
      } catch (Exception error) {
        error.printStackTrace();
        said = Map.of("error", error.toString());
      }
      System.out.println(JSON.writeValueAsString(said));
      System.out.flush();
    }
    System.exit(0);
  }

  static Map<String, Object> run(JsonNode described) throws Exception {
    String application = described.get("application").asText();
    Properties settings = new Properties();
    settings.put("application.id", application);
    settings.put("default.key.serde", Serdes.StringSerde.class);
    settings.put("default.value.serde", Serdes.StringSerde.class);
    settings.put("auto.offset.reset", "earliest");
    settings.put("commit.interval.ms", 100);
    if (!directories.containsKey(application))
      directories.put(application, Files.createTempDirectory("streams").toString());
    settings.put("state.dir", directories.get(application));
    described.get("settings").properties().forEach(one -> settings.put(one.getKey(), one.getValue().asText()));
    AtomicLong seen = new AtomicLong();
    Set<String> keys = new ConcurrentSkipListSet<>();
    StreamsTopology built = new StreamsTopology(described.get("steps"), (key, value) -> {
      keys.add(String.valueOf(key));
      seen.incrementAndGet();
    });
    Topology topology = built.build(settings);
    KafkaStreams streams = new KafkaStreams(topology, settings);
    Map<String, Object> stores = new TreeMap<>();
    try (Admin admin = Admin.create(Map.of("bootstrap.servers", settings.get("bootstrap.servers")))) {
      streams.start();
      await(admin, application, built.topics(), streams, seen, described.get("stop").asLong());
      streams.pause(); // what it has begun, it ends
      settled(admin, application, built.topics());
      Map<String, String> kinds = new TreeMap<>(built.kinds);
      unnamed(topology, built.unnamed, kinds);
      for (Map.Entry<String, String> store : kinds.entrySet())
        stores.put(store.getKey(), contentAtLast(streams, store.getKey(), store.getValue(), keys));
      if (described.get("hold").asBoolean()) return Map.of("stores", stores, "seen", seen.get());
    } catch (Exception error) {
      streams.close(Duration.ofSeconds(30));
      throw error;
    }
    CloseOptions leaving = CloseOptions.groupMembershipOperation(CloseOptions.GroupMembershipOperation.LEAVE_GROUP);
    if (!streams.close(leaving.withTimeout(Duration.ofSeconds(60)))) throw new IllegalStateException("it does not close");
    return Map.of("stores", stores, "seen", seen.get());
  }

  /** Waits until so many rows are read, or without a number until all are and nothing changes. */
  static void await(Admin admin, String group, Set<String> topics, KafkaStreams streams, AtomicLong seen, long stop)
      throws Exception {
    for (long rounds = 0; ; rounds++) {
      if (rounds > 1200) throw new IllegalStateException("it does not end: " + committed(admin, group));
      if (streams.state() == KafkaStreams.State.ERROR) throw new IllegalStateException("the application has failed");
      if (stop > 0 && seen.get() >= stop) return;
      boolean runs = streams.state() == KafkaStreams.State.RUNNING;
      if (stop == 0 && runs && read(admin, group, topics) && settled(admin, group, topics)) return;
      Thread.sleep(50);
    }
  }

  /** Whether the offsets of its topics are committed, to the ends; of those that it writes, to the mark of a commit. */
  static boolean read(Admin admin, String group, Set<String> topics) throws Exception {
    return read(admin, group, topics, 1);
  }

  /** The same, with so many marks of commits at the ends of the topics that it writes. */
  static boolean read(Admin admin, String group, Set<String> topics, long marks) throws Exception {
    Map<TopicPartition, Long> committed = committed(admin, group);
    Set<String> own = own(admin, group);
    own.removeIf(topic -> topic.endsWith("-changelog"));
    for (Map.Entry<TopicPartition, Long> end : ends(admin, own).entrySet())
      if (end.getValue() - marks > committed.getOrDefault(end.getKey(), 0L)) return false;
    for (Map.Entry<TopicPartition, Long> end : ends(admin, topics).entrySet())
      if (end.getValue() > committed.getOrDefault(end.getKey(), 0L)) return false;
    return true;
  }

  static Set<String> own(Admin admin, String group) throws Exception {
    Set<String> names = admin.listTopics().names().get();
    return names.stream().filter(name -> name.startsWith(group + "-")).collect(Collectors.toSet());
  }

  /** Waits until nothing has changed in what the application writes. */
  static boolean settled(Admin admin, String group, Set<String> inputs) throws Exception {
    Object before = null;
    for (int same = 0; same < 4; ) {
      Object now = List.of(committed(admin, group), ends(admin, own(admin, group)));
      same = now.equals(before) ? same + 1 : 0;
      before = now;
      Thread.sleep(100);
    }
    return read(admin, group, inputs);
  }

  static Map<TopicPartition, Long> committed(Admin admin, String group) throws Exception {
    Map<TopicPartition, Long> found = new HashMap<>();
    admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get().forEach((partition, offset) -> {
      if (offset != null) found.put(partition, offset.offset());
    });
    return found;
  }

  static Map<TopicPartition, Long> ends(Admin admin, Set<String> topics) throws Exception {
    Map<TopicPartition, OffsetSpec> wanted = new HashMap<>();
    admin.describeTopics(topics).allTopicNames().get().forEach((topic, description) ->
        description.partitions().forEach(one -> wanted.put(new TopicPartition(topic, one.partition()), OffsetSpec.latest())));
    Map<TopicPartition, Long> found = new HashMap<>();
    admin.listOffsets(wanted, new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).all().get().forEach((partition, result) -> found.put(partition, result.offset()));
    return found;
  }

  /** Gives the stores that Kafka Streams has named their kinds, in the order of the steps without a name. */
  static void unnamed(Topology topology, List<String> expected, Map<String, String> kinds) {
    TreeMap<String, String> found = new TreeMap<>(); // the number at the end → the name
    for (TopologyDescription.Subtopology part : topology.describe().subtopologies())
      for (TopologyDescription.Node node : part.nodes())
        if (node instanceof TopologyDescription.Processor processor)
          for (String store : processor.stores())
            if (store.matches("KSTREAM-(JOIN|OUTER)(THIS|OTHER)-\\d+-store|.*-(this|other)-join-store")) kinds.putIfAbsent(store, "window");
            else if (store.matches("(KSTREAM-(AGGREGATE|REDUCE)|KTABLE-AGGREGATE)-STATE-STORE-\\d+|.*-STATE-STORE-\\d+")
                && !store.matches("KTABLE-(SUPPRESS|FK-JOIN).*"))
              found.put(store.substring(store.length() - 10), store);
    if (found.size() != expected.size()) throw new IllegalStateException("stores " + found + " for " + expected);
    List<String> names = new ArrayList<>(found.values());
    for (int n = 0; n < names.size(); n++) kinds.put(names.get(n), expected.get(n));
  }

  /** The content of a store, as soon as no rebalance is under way. */
  static List<List<Object>> contentAtLast(KafkaStreams streams, String store, String kind, Set<String> keys)
      throws Exception {
    for (int tries = 0; ; tries++) {
      try {
        return content(streams, store, kind, keys);
      } catch (InvalidStateStoreException rebalances) {
        if (tries == 300) throw rebalances;
        Thread.sleep(100);
      }
    }
  }

  /** Rows of a store: key and value; of windows key, start and value; of sessions key, start, end and value. */
  static List<List<Object>> content(KafkaStreams streams, String store, String kind, Set<String> keys) {
    List<List<Object>> rows = new ArrayList<>();
    if (kind.equals("versioned")) {
      for (String key : new TreeSet<>(keys)) {
        StateQueryRequest<VersionedRecord<Object>> request =
            StateQueryRequest.inStore(store).withQuery(VersionedKeyQuery.<String, Object>withKey(key));
        streams.query(request).getPartitionResults().values().forEach(result -> {
          if (result.isSuccess() && result.getResult() != null)
            rows.add(List.of(key, String.valueOf(result.getResult().value())));
        });
      }
    } else if (kind.equals("session")) {
      ReadOnlySessionStore<String, Object> sessions =
          streams.store(StoreQueryParameters.fromNameAndType(store, QueryableStoreTypes.sessionStore()));
      long now = System.currentTimeMillis(), hour = 3_600_000;
      for (String key : new TreeSet<>(keys))
        try (KeyValueIterator<Windowed<String>, Object> all = sessions.findSessions(key, now - 12 * hour, now + hour)) {
          while (all.hasNext()) {
            KeyValue<Windowed<String>, Object> one = all.next();
            Window in = one.key.window();
            rows.add(List.of(one.key.key(), in.start(), in.end(), String.valueOf(one.value)));
          }
        }
    } else if (kind.equals("window")) {
      try (KeyValueIterator<Windowed<Object>, Object> all =
          streams.store(StoreQueryParameters.fromNameAndType(store, QueryableStoreTypes.windowStore())).all()) {
        while (all.hasNext()) {
          KeyValue<Windowed<Object>, Object> one = all.next();
          rows.add(List.of(String.valueOf(one.key.key()), one.key.window().start(), String.valueOf(one.value)));
        }
      }
    } else {
      try (KeyValueIterator<Object, Object> all =
          streams.store(StoreQueryParameters.fromNameAndType(store, QueryableStoreTypes.keyValueStore())).all()) {
        while (all.hasNext()) {
          KeyValue<Object, Object> one = all.next();
          rows.add(List.of(String.valueOf(one.key), String.valueOf(one.value)));
        }
      }
    }
    return rows;
  }
}
