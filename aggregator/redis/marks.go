package redis

import (
	"context"
	"fmt"
	"strings"

	"github.com/weirhq/weir/aggregator"
)

// Incarnation names one incarnation of a key's bucket at a gateway.
type Incarnation struct {
	Key         aggregator.Key
	Gateway     string
	Boot        string
	Incarnation uint32
}

// Cums returns the cumulative counts that Redis holds for these keys. What has expired is not among them.
func (c *Counter) Cums(ctx context.Context, keys []aggregator.Key) (map[Incarnation]uint64, error) {
	out := map[Incarnation]uint64{}
	for lo := 0; lo < len(keys); lo += c.cfg.Pipeline {
		part := keys[lo:min(lo+c.cfg.Pipeline, len(keys))]
		pipe := c.rdb.Pipeline()
		for _, k := range part {
			pipe.HGetAll(ctx, c.Name(k))
		}
		cmds, err := pipe.Exec(ctx)
		if err != nil {
			return nil, fmt.Errorf("read the counts of %d keys: %w", len(keys), c.failed(err))
		}
		for i, cmd := range cmds {
			fields, ok := cmd.(interface{ Val() map[string]string })
			if !ok {
				return nil, fmt.Errorf("read the counts of %d keys: reply is %T", len(keys), cmd)
			}
			for field, mark := range fields.Val() {
				rest, ok := strings.CutPrefix(field, "c:")
				if !ok {
					continue
				}
				in := Incarnation{Key: part[i]}
				var cum uint64
				name := strings.Split(rest, ":")
				if len(name) != 3 {
					continue // a damaged field: the next report makes it good
				}
				in.Gateway, in.Boot = name[0], name[1]
				if _, err := fmt.Sscan(name[2], &in.Incarnation); err != nil {
					continue
				}
				if _, err := fmt.Sscan(mark, &cum); err != nil {
					continue
				}
				out[in] = cum
			}
		}
	}
	return out, nil
}
