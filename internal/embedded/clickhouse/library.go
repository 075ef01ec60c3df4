package clickhouse

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// LibraryEnv names a libchdb.so that is already there.
const LibraryEnv = "WEIR_LIBCHDB"

// lock is the npm package that brings the library: name, version, integrity. `make libchdb` reads the same file.
//
//go:embed libchdb.lock
var lock string

// LibraryVersion is the version of the npm package with the ClickHouse engine that `make libchdb` installs.
func LibraryVersion() string { return strings.Fields(lock)[1] }

// Library finds libchdb.so: the file that WEIR_LIBCHDB names, else the one that `make libchdb` put into the cache.
func Library() (string, error) {
	if path := os.Getenv(LibraryEnv); path != "" {
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("ClickHouse engine named by %s: %w", LibraryEnv, err)
		}
		return path, nil
	}
	cache, err := os.UserCacheDir() // XDG_CACHE_HOME, else ~/.cache
	if err != nil {
		return "", fmt.Errorf("ClickHouse engine: %s is not set and there is no cache folder: %w", LibraryEnv, err)
	}
	path := filepath.Join(cache, "weir", "libchdb-"+LibraryVersion(), "libchdb.so")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("ClickHouse engine: %w; run `make libchdb`, or name a libchdb.so with %s", err, LibraryEnv)
	}
	return path, nil
}
