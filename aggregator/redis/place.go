package redis

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"
)

// Place is a place in a stream. The zero Place is none.
type Place struct {
	Stream string // which life of it, as in schemas.Batch
	Seq    uint64
}

var (
	//go:embed lua/place.lua
	placeText   string
	placeScript = redis.NewScript(placeText)
)

// Note notes beside the keys that reports up to a place, at least, were folded, or of none only that something was folded. It returns the
// place that was noted before, and whether Redis went back since the last Note, to a copy or by a failover: nothing is noted then. Of what is
// not followed by a Note nobody sees the loss. It is for one goroutine at a time.
func (c *Counter) Note(ctx context.Context, at Place) (before Place, back bool, err error) {
	fail := func(err error) (Place, bool, error) {
		return Place{}, false, fmt.Errorf("note how far reports were folded: %w", c.failed(err))
	}
	v, err := placeScript.Run(ctx, c.rdb, []string{c.cfg.Namespace + ":folded"}, c.noted.Load(), at.Seq, at.Stream).Slice()
	if err != nil {
		return fail(err)
	}
	var ok [4]bool
	var count, went int64
	var seq string
	if len(v) == len(ok) {
		count, ok[0] = v[0].(int64)
		went, ok[1] = v[1].(int64)
		seq, ok[2] = v[2].(string)
		before.Stream, ok[3] = v[3].(string)
	}
	if ok != [4]bool{true, true, true, true} {
		return fail(fmt.Errorf("script returned %v", v))
	}
	if before.Seq, err = strconv.ParseUint(seq, 10, 64); err != nil {
		return fail(err)
	}
	c.noted.Store(count)
	return before, went == 1, nil
}
