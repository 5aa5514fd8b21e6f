// A blob store for Samza in a directory (`blobs.directory`): each blob is a file JOB/ID/TASK/STORE/<random>.
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.ExecutorService;
import org.apache.samza.config.Config;
import org.apache.samza.job.model.JobModel;
import org.apache.samza.storage.BlobStoreAdminFactory;
import org.apache.samza.storage.StateBackendAdmin;
import org.apache.samza.storage.blobstore.BlobStoreManager;
import org.apache.samza.storage.blobstore.BlobStoreManagerFactory;
import org.apache.samza.storage.blobstore.Metadata;
import org.apache.samza.storage.blobstore.exceptions.DeletedException;

public class Blobs implements BlobStoreManager {
  private final Path root;

  Blobs(Config config) {
    root = Path.of(config.get("blobs.directory"));
  }

  public static class Factory implements BlobStoreManagerFactory, BlobStoreAdminFactory {
    public BlobStoreManager getBackupBlobStoreManager(Config config, ExecutorService executor) {
      return new Blobs(config);
    }

    public BlobStoreManager getRestoreBlobStoreManager(Config config, ExecutorService executor) {
      return new Blobs(config);
    }

    public StateBackendAdmin getStateBackendAdmin(Config config, JobModel model) {
      return new StateBackendAdmin() {
        public void createResources() {}

        public void validateResources() {}
      };
    }
  }

  private interface Action {
    String run() throws Exception;
  }

  private static CompletableFuture<String> done(String id, Action action) {
    try {
      return CompletableFuture.completedFuture(action.run());
    } catch (NoSuchFileException error) {
      return CompletableFuture.failedFuture(new DeletedException(id, error));
    } catch (Exception error) {
      return CompletableFuture.failedFuture(error);
    }
  }

  public void init() {}

  public CompletionStage<String> put(InputStream body, Metadata about) {
    String owner = String.join("/", about.getJobName(), about.getJobId(), about.getTaskName(), about.getStoreName());
    String id = owner + "/" + UUID.randomUUID();
    return done(id, () -> {
      Files.createDirectories(root.resolve(owner));
      Files.copy(body, root.resolve(id));
      return id;
    });
  }

  public CompletionStage<Void> get(String id, OutputStream body, Metadata about) {
    return done(id, () -> id.substring(0, (int) Math.min(0, Files.copy(root.resolve(id), body)))).thenAccept(x -> {});
  }

  public CompletionStage<Void> delete(String id, Metadata about) {
    return done(id, () -> Files.deleteIfExists(root.resolve(id)) ? id : id).thenAccept(x -> {});
  }

  public CompletionStage<Void> removeTTL(String id, Metadata about) {
    return done(id, () -> root.resolve(id).toRealPath().toString()).thenAccept(x -> {});
  }

  public void close() {}
}
