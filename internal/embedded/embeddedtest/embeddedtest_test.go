package embeddedtest

import (
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/redis/go-redis/v9"
)

// Two of each run side by side, and neither sees what is in the other.
func TestServersAreFreshAndReal(t *testing.T) {
	ctx := context.Background()
	for range 2 {
		nc, err := nats.Connect(NATS(t).URL())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		js, err := jetstream.New(nc)
		if err != nil {
			t.Fatal(err)
		}
		if a, err := js.AccountInfo(ctx); err != nil || a.Streams != 0 {
			t.Errorf("streams = %+v, %v, want none", a, err)
		}
		if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}}); err != nil {
			t.Error(err)
		}

		opts, err := redis.ParseURL(Redis(t).URL())
		if err != nil {
			t.Fatal(err)
		}
		c := redis.NewClient(opts)
		t.Cleanup(func() { _ = c.Close() })
		if info, err := c.Info(ctx, "server").Result(); err != nil || !strings.Contains(info, "redis_mode:standalone") {
			t.Errorf("INFO = %q, %v, want a redis-server's", info, err)
		}
		if n, err := c.Incr(ctx, "n").Result(); err != nil || n != 1 {
			t.Errorf("INCR = %d, %v, want 1", n, err)
		}

		url := strings.TrimSuffix(ClickHouse(t).URL(), "weir")
		for _, tt := range []struct{ sql, want string }{
			{"SELECT count() FROM system.tables WHERE database = 'weir'", "0\n"},
			{"CREATE TABLE weir.t (a UInt8) ENGINE = MergeTree ORDER BY a", ""},
		} {
			res, err := http.Post(url, "", strings.NewReader(tt.sql))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(res.Body); err != nil || string(got) != tt.want {
				t.Errorf("%s = %q, %v, want %q", tt.sql, got, err, tt.want)
			}
			_ = res.Body.Close()
		}
	}
}
