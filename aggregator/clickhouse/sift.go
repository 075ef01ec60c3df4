package clickhouse

import (
	"context"
	"errors"
	"fmt"

	ch "github.com/ClickHouse/clickhouse-go/v2"

	"github.com/weirhq/weir/schemas"
)

// sift puts items under a token, and, where they are refused, each half of them, down to the ones that are to blame. It
// returns those that were put and those that were refused. What is put, and under which token, depends on the items and
// on what is refused alone, so that the same again is harmless. One that is refused in n costs 2·log2(n) puts.
func sift[I any](ctx context.Context, token string, items []I, seq func(*I) uint64, put func(context.Context, string, []I) error) (kept []I, refused schemas.Refused, err error) {
	var part func(tok string, items []I) error
	part = func(tok string, items []I) error {
		if len(items) == 0 {
			return nil
		}
		err := put(ctx, tok, items)
		switch {
		case err == nil:
			kept = append(kept, items...)
			return nil
		case !refusal(err):
			return err
		case len(items) == 1:
			refused = append(refused, schemas.RefusedMessage{Seq: seq(&items[0]), Detail: words(err)})
			return nil
		}
		for _, half := range [][]I{items[:len(items)/2], items[len(items)/2:]} {
			if err := part(fmt.Sprintf("%s-%d-%d", token, seq(&half[0]), seq(&half[len(half)-1])), half); err != nil {
				return err
			}
		}
		return nil
	}
	err = part(token, items)
	return kept, refused, err
}

// refusal says whether err, which is the driver's, would be the answer to the same rows at any time.
func refusal(err error) bool {
	if ex, ok := errors.AsType[*ch.Exception](err); ok {
		return errors.Is(kinds[ex.Code], ErrRefused)
	}
	return errors.Is(err, ErrRefused)
}

// words are the server's about a refusal.
func words(err error) string {
	if ex, ok := errors.AsType[*ch.Exception](err); ok {
		return fmt.Sprintf("ClickHouse: code %d: %s", ex.Code, oneLine(ex.Message))
	}
	return oneLine(err.Error())
}
