package redis_test

import (
	"testing"

	"github.com/alicebob/miniredis/v2"

	"github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
)

// TestNoteTellsThatRedisWentBack: whoever notes what it folds learns that Redis went back, to however short a time ago. The place that was
// noted stays until then, and who comes later finds it.
func TestNoteTellsThatRedisWentBack(t *testing.T) {
	for name, url := range map[string]string{"redis-server": embeddedtest.Redis(t).URL(), "miniredis": "redis://" + miniredis.RunT(t).Addr()} {
		t.Run(name, func(t *testing.T) { noteTells(t, url) })
	}
}

func noteTells(t *testing.T, url string) {
	c, r := open(t, redis.Config{URL: url, Timeout: patient}), raw(t, url)
	const key = "weir:folded"
	note := func(c *redis.Counter, at, want redis.Place, wantBack bool) {
		t.Helper()
		before, back, err := c.Note(ctx, at)
		if err != nil || before != want || back != wantBack {
			t.Errorf("Note(%v) = %v, %v, %v, want %v, %v", at, before, back, err, want, wantBack)
		}
	}
	is := func() string { return r.Get(ctx, key).Val() }
	set := func(v string) {
		t.Helper()
		if err := r.Set(ctx, key, v, 0).Err(); err != nil {
			t.Fatal(err)
		}
	}
	none, seven, eight, nine := redis.Place{}, redis.Place{Stream: "S@1", Seq: 7}, redis.Place{Stream: "S@1", Seq: 8}, redis.Place{Stream: "S@1", Seq: 9}
	note(c, none, none, false)
	note(c, seven, none, false)
	note(c, none, seven, false)
	copied := is()
	note(c, none, seven, false)
	set(copied)
	note(c, eight, seven, true)
	if place := is(); place != "5 7 S@1" {
		t.Errorf("noted %q while Redis lacks something, want place 7 and a count above all", place)
	}
	set(copied)
	note(c, none, seven, true) // and again
	other := open(t, redis.Config{URL: url, Timeout: patient})
	note(other, none, seven, false) // another process cannot tell
	note(other, eight, seven, false)
	note(c, nine, eight, false) // that another one notes as well is no loss
	if err := r.FlushAll(ctx).Err(); err != nil {
		t.Fatal(err)
	}
	note(c, nine, none, true)
	note(c, nine, none, false)
	note(other, none, nine, false)
	set("rubbish")
	note(c, none, none, true)
}
