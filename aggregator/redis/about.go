package redis

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// About asks Redis for its version and its clock, which is the one that refills the central buckets. An error wraps
// ErrUnreachable when there is no Redis to ask.
func (c *Counter) About(ctx context.Context) (version string, now time.Time, err error) {
	now, err = c.rdb.Time(ctx).Result()
	if err != nil {
		return "", now, c.failed(err)
	}
	info, err := c.rdb.Info(ctx, "server").Result()
	if err != nil {
		return "", now, fmt.Errorf("ask for the version: %w", c.failed(err))
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(line, "redis_version:"); ok {
			return strings.TrimSpace(v), now, nil
		}
	}
	return "unknown", now, nil
}
