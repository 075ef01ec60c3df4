package app

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	embedded "github.com/weirhq/weir/internal/embedded/redis"
	"github.com/weirhq/weir/internal/obs/obstest"
	"github.com/weirhq/weir/schemas"
)

// took is the report of a gateway whose buckets of these keys gave 2 tokens each, for the so manieth time.
func (c *centre) took(gateway, boot string, seq uint64, keys map[string]uint64) *schemas.Report {
	r := c.report(seq)
	r.Gateway, r.Boot = gateway, boot
	one := r.Tokens[0]
	r.Usage, r.Tokens = nil, nil
	for key, n := range keys {
		one.Key, one.Tenant, one.Cum = key, key, 2*n
		r.Usage = append(r.Usage, schemas.Usage{Time: r.SealedAt, Tenant: key, Route: "orders", Allowed: 2, Cost: 2})
		r.Tokens = append(r.Tokens, one)
	}
	return r
}

func (c *centre) becomesTotal(key string, want int64) {
	c.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		got, err := c.books.Counter.Total(c.t.Context(), aggregator.Key{Rule: "contract", Key: key})
		if err == nil && got == want {
			return
		}
		if time.Now().After(end) {
			c.t.Fatalf("Redis has %d tokens of %s, %v, want %d", got, key, err, want)
		}
	}
}

// TestRedisThatWentBack: Redis comes back as it was a moment ago, before an idle key was used last and before a gateway had its last
// reports stored and ended. Nobody reports these again, and they are whole all the same, whether an aggregator saw it happen or came later.
func TestRedisThatWentBack(t *testing.T) {
	for name, seen := range map[string]bool{"under an aggregator": true, "under none": false} {
		t.Run(name, func(t *testing.T) {
			server, err := embedded.Start(embedded.Config{Dir: t.TempDir(), Real: true}, embeddedtest.Log(t)) // it begins with what SAVE has written
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = server.Stop() })
			opt, err := goredis.ParseURL(server.URL())
			if err != nil {
				t.Fatal(err)
			}
			raw := goredis.NewClient(opt)
			t.Cleanup(func() { _ = raw.Close() })
			c := newBooks(t, server.URL())
			var lines obstest.Lines
			log := slog.New(slog.NewTextHandler(&lines, nil))
			stop := c.aggregator(log)

			c.send(c.took("ended", "e", 1, map[string]uint64{"ends": 1}))
			c.send(c.took("gw", "boot", 1, map[string]uint64{"idle": 1, "busy": 1}))
			c.becomesTotal("busy", 2)
			c.becomesTotal("ends", 2)
			within(t, "the place is noted", func() bool {
				return strings.Contains(raw.Get(t.Context(), "weir:folded").Val(), " 2 "+schemas.UsageStream)
			})
			if err := raw.Save(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			c.send(c.took("ended", "e", 2, map[string]uint64{"ends": 2}))
			c.send(c.took("ended", "born", 1, map[string]uint64{"ends": 1}))
			c.send(c.took("gw", "boot", 2, map[string]uint64{"idle": 2, "busy": 2}))
			c.becomesTotal("idle", 4)
			c.becomesTotal("ends", 6)
			if !seen {
				stop()
			}
			if err := server.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := server.Restart(); err != nil {
				t.Fatal(err)
			}
			if !seen {
				c.aggregator(log)
			}
			c.send(c.took("gw", "boot", 3, map[string]uint64{"busy": 3}))
			c.becomesTotal("busy", 6)
			c.becomesTotal("idle", 4)
			c.becomesTotal("ends", 6)
			c.becomesStored(6)
			if r := c.becomes(""); r.Requests != 16 || r.Counts != 4 {
				t.Errorf("reconciliation = %+v, want 16 requests and 4 counts in Redis", r)
			}
			cums, err := c.books.Counter.Cums(t.Context(), []aggregator.Key{{Rule: "contract", Key: "ends"}})
			for boot, want := range map[string]uint64{"e": 4, "born": 2} {
				if got := cums[redis.Incarnation{Key: aggregator.Key{Rule: "contract", Key: "ends"}, Gateway: "ended", Boot: boot}]; err != nil || got != want {
					t.Errorf("Redis has %d of boot %q, %v, want %d", got, boot, err, want)
				}
			}
			want := "Redis went back: the reports that it may lack were folded again"
			if !seen {
				want = "the last reports were folded again, in case Redis has lost them"
			}
			if n := strings.Count(lines.String(), want); n != 1 {
				t.Errorf("the log says %d times %q, want once:\n%s", n, want, &lines)
			}
		})
	}
}
