package statemgr;

import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.spark.Partition;
import org.apache.spark.SparkEnv;
import org.apache.spark.TaskContext;
import org.apache.spark.rdd.RDD;
import org.apache.spark.scheduler.SparkListener;
import org.apache.spark.scheduler.SparkListenerStageCompleted;
import org.apache.spark.scheduler.SparkListenerStageSubmitted;
import org.apache.spark.scheduler.SparkListenerTaskEnd;
import org.apache.spark.storage.BlockManagerId;
import org.apache.spark.storage.RDDInfo;
import scala.jdk.javaapi.CollectionConverters;
import scala.reflect.ClassTag$;

/**
 * Remembers on which executor each task of each job ran last, and asks Spark to run it there again.
 *
 * Spark's driver compiles this class with Janino, which knows no generic types and no lambdas.
 */
public final class Placement extends SparkListener {
    private static final String NAME = "state of ";

    /** Job, then task: the executor that ran it last. */
    private final Map ran = new HashMap();
    /** Job, then task: the executor on which it has failed since. */
    private final Map failed = new HashMap();
    /** The stages that run: ID, then the job. */
    private final Map stages = new HashMap();

    /** Return the rows with the wish that each partition be processed where the job's task of its number ran last. */
    public synchronized RDD place(String job, RDD rows) {
        if (!ran.containsKey(job)) {
            ran.put(job, new HashMap());
            failed.put(job, new HashMap());
        }
        int tasks = rows.partitions().length;
        RDD placed = new Placed(rows, chosen((Map) ran.get(job), (Map) failed.get(job), tasks, executors()));
        placed.setName(NAME + job);
        return placed;
    }

    public synchronized void onStageSubmitted(SparkListenerStageSubmitted event) {
        for (scala.collection.Iterator infos = event.stageInfo().rddInfos().iterator(); infos.hasNext();) {
            String name = ((RDDInfo) infos.next()).name();
            String job = name != null && name.startsWith(NAME) ? name.substring(NAME.length()) : null;
            if (ran.containsKey(job)) {
                stages.put(Integer.valueOf(event.stageInfo().stageId()), job);
            }
        }
    }

    public synchronized void onTaskEnd(SparkListenerTaskEnd event) {
        Object job = stages.get(Integer.valueOf(event.stageId()));
        if (job == null) {
            return;
        }
        Integer task = Integer.valueOf(event.taskInfo().partitionId());
        if (event.taskInfo().successful()) {
            ((Map) ran.get(job)).put(task, event.taskInfo().executorId());
            ((Map) failed.get(job)).remove(task);
        } else if (event.taskInfo().failed()) {
            ((Map) failed.get(job)).put(task, event.taskInfo().executorId());
        }
    }

    public synchronized void onStageCompleted(SparkListenerStageCompleted event) {
        stages.remove(Integer.valueOf(event.stageInfo().stageId()));
    }

    /** The executors that live: ID, then the location by which Spark's scheduler knows it. */
    private static Map executors() {
        Map found = new TreeMap();
        scala.collection.Iterator ids = SparkEnv.get().blockManager().master().getMemoryStatus().keysIterator();
        while (ids.hasNext()) {
            BlockManagerId id = (BlockManagerId) ids.next();
            if (!id.isDriver()) {
                found.put(id.executorId(), "executor_" + id.host() + "_" + id.executorId());
            }
        }
        return found;
    }

    /**
     * Choose the location of each task. No executor gets more tasks than its share, so that none is idle. Only a task
     * that has failed on the one that has room goes to another.
     */
    private static String[] chosen(Map ran, Map failed, int tasks, Map executors) {
        String[] chosen = new String[tasks];
        if (executors.isEmpty()) {
            return chosen;
        }
        int share = (tasks + executors.size() - 1) / executors.size();
        Map counts = new TreeMap();
        for (Iterator ids = executors.keySet().iterator(); ids.hasNext();) {
            counts.put(ids.next(), Integer.valueOf(0));
        }
        for (int task = 0; task < tasks; task++) {
            Object executor = ran.get(Integer.valueOf(task));
            boolean good = executor != null && !executor.equals(failed.get(Integer.valueOf(task)));
            if (good && executors.containsKey(executor) && count(counts, executor) < share) {
                counts.put(executor, Integer.valueOf(count(counts, executor) + 1));
                chosen[task] = (String) executors.get(executor);
            }
        }
        for (int task = 0; task < tasks; task++) {
            if (chosen[task] == null) {
                Object bad = failed.get(Integer.valueOf(task));
                Object fewest = counts.keySet().iterator().next();
                for (Iterator ids = counts.keySet().iterator(); ids.hasNext();) {
                    Object id = ids.next();
                    if (fewest.equals(bad) || (!id.equals(bad) && count(counts, id) < count(counts, fewest))) {
                        fewest = id;
                    }
                }
                counts.put(fewest, Integer.valueOf(count(counts, fewest) + 1));
                chosen[task] = (String) executors.get(fewest);
            }
        }
        return chosen;
    }

    private static int count(Map counts, Object executor) {
        return ((Integer) counts.get(executor)).intValue();
    }

    /** Rows with locations. Only the driver knows this class: an executor gets the rows in its place. */
    private static final class Placed extends RDD {
        private final RDD rows;
        private final String[] locations;

        Placed(RDD rows, String[] locations) {
            super(rows, ClassTag$.MODULE$.apply(Object.class));
            this.rows = rows;
            this.locations = locations;
        }

        public Partition[] getPartitions() {
            return rows.partitions();
        }

        public scala.collection.immutable.Seq getPreferredLocations(Partition partition) {
            String location = locations[partition.index()];
            List found = location == null ? Collections.emptyList() : Collections.singletonList(location);
            return CollectionConverters.asScala(found).toSeq();
        }

        public scala.collection.Iterator compute(Partition partition, TaskContext context) {
            return rows.iterator(partition, context);
        }

        /** What Java's serialization writes in place of this object. */
        public Object writeReplace() {
            return rows;
        }
    }
}
