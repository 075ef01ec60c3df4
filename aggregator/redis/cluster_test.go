package redis_test

import (
	"context"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/child"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// cluster runs three masters and returns their addresses.
func cluster(t *testing.T) (addrs []string) {
	t.Helper()
	var nodes []*goredis.Client
	for i := range 3 {
		addr, port := free(t)
		p, err := child.Start(exec.Command("redis-server", "--bind", "127.0.0.1", "--port", port, "--dir", t.TempDir(), "--save", "",
			"--loglevel", "warning", "--cluster-enabled", "yes", "--daemonize", "no"), func(line string) { embeddedtest.Log(t).Info(line) })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Kill() })
		n := raw(t, "redis://"+addr)
		eventually(t, func() bool { return n.Ping(ctx).Err() == nil })
		if err := n.ClusterAddSlotsRange(ctx, []int{0, 5461, 10923}[i], []int{5460, 10922, 16383}[i]).Err(); err != nil {
			t.Fatal(err)
		}
		addrs, nodes = append(addrs, addr), append(nodes, n)
		if i > 0 {
			_, first, _ := strings.Cut(addrs[0], ":")
			if err := n.ClusterMeet(ctx, "127.0.0.1", first).Err(); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, func() bool {
		for _, n := range nodes {
			info := n.ClusterInfo(ctx).Val()
			if !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_known_nodes:3") || !strings.Contains(info, "cluster_size:3") {
				return false
			}
		}
		return true
	})
	return addrs
}

// free is an address that was free a moment ago; the cluster's bus takes the port ten thousand higher.
func free(t *testing.T) (addr, port string) {
	t.Helper()
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		at := l.Addr().(*net.TCPAddr)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		if at.Port <= 55535 {
			return at.String(), strconv.Itoa(at.Port)
		}
	}
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patient); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it never came to be")
		}
	}
}

// TestB016Cluster: a cluster of three masters, users whose names would break a hash tag, and a slot that moves while it is used.
func TestB016Cluster(t *testing.T) {
	addrs := cluster(t)
	url := "redis://" + addrs[0]
	t.Run("conformance", func(t *testing.T) {
		aggregatortest.Counter(t, func(t *testing.T) aggregator.Counter {
			for _, a := range addrs {
				if err := raw(t, "redis://"+a).FlushAll(ctx).Err(); err != nil {
					t.Fatal(err)
				}
			}
			return open(t, redis.Config{URL: url, Cluster: true, Timeout: patient})
		})
	})
	c := open(t, redis.Config{URL: url, Cluster: true, Timeout: patient})
	l := aggregator.Limit{RateNanos: 1, Burst: 2}
	users := []string{"u1", "}", "}x", "{vip}", "a}b", "", "日本"}
	var folds []aggregator.Fold
	for _, u := range users {
		folds = append(folds, aggregator.Fold{Key: aggregator.Key{Rule: "per-user", Key: u}, Limit: l})
	}
	t.Run("names", func(t *testing.T) {
		for cum := range uint64(5) {
			for i := range folds {
				folds[i].Uses = []aggregator.Use{took("g1", cum+1)}
			}
			states, err := c.Fold(ctx, folds)
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range states {
				if want := max(1-float64(cum), -2); tokens(s) != want {
					t.Errorf("user %q: level %v after %d, want %v", users[i], tokens(s), cum+1, want)
				}
			}
		}
	})
	t.Run("takes of all nodes at once", func(t *testing.T) { // their caches are emptied between; each token is taken once
		var takes []aggregator.Take
		nodes := map[string]bool{}
		for _, u := range users {
			k := aggregator.Key{Rule: "strict", Key: u}
			takes = append(takes, aggregator.Take{Key: k, Limit: l, Cost: 1})
			at, _, _ := owner(t, addrs, c.Name(k))
			nodes[at] = true
		}
		if len(nodes) < 2 {
			t.Fatalf("all keys are on %v", nodes)
		}
		for n := range 3 {
			for _, a := range addrs {
				if err := raw(t, "redis://"+a).ScriptFlush(ctx).Err(); err != nil {
					t.Fatal(err)
				}
			}
			taken, err := c.Take(ctx, takes)
			if err != nil {
				t.Fatal(err)
			}
			for i := range taken {
				if taken[i].OK != (n < 2) || taken[i].LevelMicros != max(1-int64(n), 0)*1e6 {
					t.Errorf("take %d of user %q: %+v", n+1, users[i], taken[i])
				}
			}
		}
	})
	t.Run("a slot moves", func(t *testing.T) {
		from, to, slot := owner(t, addrs, c.Name(folds[0].Key))
		var folded atomic.Uint64
		stop, done := make(chan struct{}), make(chan error, 1)
		go func() {
			for cum := uint64(6); ; cum++ {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				for i := range folds {
					folds[i].Uses = []aggregator.Use{took("g1", cum)}
				}
				if _, err := c.Fold(ctx, folds); err != nil {
					done <- err
					return
				}
				folded.Store(cum)
			}
		}()
		move(t, addrs, from, to, slot, folded.Load)
		seen := folded.Load()
		eventually(t, func() bool { return folded.Load() > seen+20 || len(done) > 0 })
		close(stop)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if now, _, _ := owner(t, addrs, c.Name(folds[0].Key)); now != to {
			t.Errorf("the slot is at %s, want %s", now, to)
		}
		for _, f := range folds {
			if n, err := c.Total(ctx, f.Key); n != int64(folded.Load()) || err != nil {
				t.Errorf("total of %v = %d, %v, want %d", f.Key, n, err, folded.Load())
			}
		}
	})
}

// owner finds the node of a key's slot, and another one.
func owner(t *testing.T, addrs []string, name string) (at, other string, slot int) {
	t.Helper()
	n := raw(t, "redis://"+addrs[0])
	slot = int(n.ClusterKeySlot(ctx, name).Val())
	for _, s := range n.ClusterSlots(ctx).Val() { //nolint:staticcheck // Redis 6 has no shards
		if s.Start <= slot && slot <= s.End {
			at = s.Nodes[0].Addr
		}
	}
	for _, a := range addrs {
		if a != at {
			other = a
		}
	}
	if at == "" {
		t.Fatalf("slot %d has no owner", slot)
	}
	return at, other, slot
}

// move moves a slot as redis-cli --cluster reshard does, while folds go on between the steps.
func move(t *testing.T, addrs []string, from, to string, slot int, folded func() uint64) {
	t.Helper()
	ctx := context.Background()
	id := func(addr string) string { return raw(t, "redis://"+addr).Do(ctx, "CLUSTER", "MYID").Val().(string) }
	do := func(addr string, args ...any) {
		t.Helper()
		if err := raw(t, "redis://"+addr).Do(ctx, args...).Err(); err != nil {
			t.Fatalf("%v on %s: %v", args, addr, err)
		}
	}
	on := func() {
		t.Helper()
		seen := folded()
		eventually(t, func() bool { return folded() > seen+10 })
	}
	on()
	do(to, "CLUSTER", "SETSLOT", slot, "IMPORTING", id(from))
	do(from, "CLUSTER", "SETSLOT", slot, "MIGRATING", id(to))
	on()
	host, port, _ := net.SplitHostPort(to)
	for _, key := range raw(t, "redis://"+from).ClusterGetKeysInSlot(ctx, slot, 100).Val() {
		do(from, "MIGRATE", host, port, key, 0, 5000)
	}
	on() // the key is there, the slot still here: ASK
	for _, a := range append([]string{to, from}, addrs...) {
		do(a, "CLUSTER", "SETSLOT", slot, "NODE", id(to))
	}
	on() // MOVED
}
