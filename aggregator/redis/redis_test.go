package redis_test

import (
	"context"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/aggregatortest"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// patient is for tests in which a slow machine must decide nothing.
const patient = 20 * time.Second

func open(t testing.TB, cfg redis.Config) *redis.Counter {
	t.Helper()
	c, err := redis.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// raw is a client beside the counter, to look and to do damage.
func raw(t testing.TB, url string) *goredis.Client {
	t.Helper()
	o, err := goredis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	c := goredis.NewClient(o)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestConformance(t *testing.T) {
	s := embeddedtest.Redis(t)
	aggregatortest.Counter(t, func(t *testing.T) aggregator.Counter {
		if err := raw(t, s.URL()).FlushAll(context.Background()).Err(); err != nil {
			t.Fatal(err)
		}
		return open(t, redis.Config{URL: s.URL(), Timeout: patient})
	})
}

// TestConformanceMiniredis is the second target: what `weir up` falls back to where no redis-server is installed.
func TestConformanceMiniredis(t *testing.T) {
	aggregatortest.Counter(t, func(t *testing.T) aggregator.Counter {
		return open(t, redis.Config{URL: "redis://" + miniredis.RunT(t).Addr(), Timeout: patient})
	})
}
