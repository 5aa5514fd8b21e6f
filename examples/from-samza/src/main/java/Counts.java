// A job of Apache Samza that counts rows by key: Counts FILE.properties.
// `rows` in the file says after how many rows it stops, when every task has committed (`task.commit.ms`).
// A row "0" deletes its key. With `crash` it dies instead, when its changes are in the changelog.
import java.io.FileInputStream;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import org.apache.samza.application.LegacyTaskApplication;
import org.apache.samza.config.MapConfig;
import org.apache.samza.context.Context;
import org.apache.samza.runtime.LocalApplicationRunner;
import org.apache.samza.storage.kv.KeyValueStore;
import org.apache.samza.system.IncomingMessageEnvelope;
import org.apache.samza.task.InitableTask;
import org.apache.samza.task.MessageCollector;
import org.apache.samza.task.StreamTask;
import org.apache.samza.task.TaskCoordinator;

public class Counts implements StreamTask, InitableTask {
  static CountDownLatch left;
  static boolean crash;
  KeyValueStore<String, String> counts;

  @SuppressWarnings("unchecked")
  public void init(Context context) {
    counts = (KeyValueStore<String, String>) context.getTaskContext().getStore("counts");
  }

  public void process(IncomingMessageEnvelope row, MessageCollector collector, TaskCoordinator coordinator) {
    String key = (String) row.getKey();
    String before = counts.get(key);
    if (row.getMessage().equals("0")) counts.delete(key);
    else counts.put(key, Integer.toString(before == null ? 1 : Integer.parseInt(before) + 1));
    if (crash) counts.flush();
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
    crash = config.containsKey("crash");
    LocalApplicationRunner runner =
        new LocalApplicationRunner(new LegacyTaskApplication("Counts"), new MapConfig(config));
    runner.run();
    left.await();
    if (crash) {
      Thread.sleep(2000); // the producer sends what it has
      Runtime.getRuntime().halt(9);
    }
    Thread.sleep(4 * Long.parseLong(config.get("task.commit.ms")));
    runner.kill();
    runner.waitForFinish();
    System.out.println(runner.status());
    System.exit(runner.status().toString().startsWith("SuccessfulFinish") ? 0 : 1);
  }
}
