// A job of Apache Samza with several stores: SamzaShapes FILE.properties.
// `counts` has the number of rows of each key, `last` its last value, and `names`, which exists if the file configures
// it, is fed from a side input. `rows` says after how many rows of the input it stops, when every task has committed.
import java.io.FileInputStream;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.samza.application.LegacyTaskApplication;
import org.apache.samza.config.Config;
import org.apache.samza.config.MapConfig;
import org.apache.samza.context.Context;
import org.apache.samza.metrics.MetricsRegistry;
import org.apache.samza.runtime.LocalApplicationRunner;
import org.apache.samza.storage.SideInputsProcessor;
import org.apache.samza.storage.SideInputsProcessorFactory;
import org.apache.samza.storage.kv.Entry;
import org.apache.samza.storage.kv.KeyValueStore;
import org.apache.samza.system.IncomingMessageEnvelope;
import org.apache.samza.task.InitableTask;
import org.apache.samza.task.MessageCollector;
import org.apache.samza.task.StreamTask;
import org.apache.samza.task.TaskCoordinator;

public class SamzaShapes implements StreamTask, InitableTask {
  static CountDownLatch left;
  KeyValueStore<String, String> counts;
  KeyValueStore<String, String> last;

  public static class Names implements SideInputsProcessorFactory {
    public SideInputsProcessor getSideInputsProcessor(Config config, MetricsRegistry metrics) {
      return new SideInputsProcessor() {
        public Collection<Entry<?, ?>> process(IncomingMessageEnvelope row, KeyValueStore store) {
          return List.of(new Entry<>(row.getKey(), row.getMessage()));
        }
      };
    }
  }

  @SuppressWarnings("unchecked")
  public void init(Context context) {
    counts = (KeyValueStore<String, String>) context.getTaskContext().getStore("counts");
    last = (KeyValueStore<String, String>) context.getTaskContext().getStore("last");
  }

  public void process(IncomingMessageEnvelope row, MessageCollector collector, TaskCoordinator coordinator) {
    String key = (String) row.getKey();
    String before = counts.get(key);
    counts.put(key, Integer.toString(before == null ? 1 : Integer.parseInt(before) + 1));
    last.put(key, (String) row.getMessage());
    left.countDown();
  }

  public static void main(String[] arguments) throws Exception {
    Properties read = new Properties();
    try (FileInputStream file = new FileInputStream(arguments[0])) {
      read.load(file);
    }
    Map<String, String> config = new HashMap<>();
    read.forEach((key, value) -> config.put((String) key, (String) value));
    left = new CountDownLatch(Integer.parseInt(config.get("rows")));
    LocalApplicationRunner runner =
        new LocalApplicationRunner(new LegacyTaskApplication("SamzaShapes"), new MapConfig(config));
    runner.run();
    left.await();
    Thread.sleep(4 * Long.parseLong(config.get("task.commit.ms")));
    runner.kill();
    runner.waitForFinish();
    System.exit(runner.status().toString().startsWith("SuccessfulFinish") ? 0 : 1);
  }
}
