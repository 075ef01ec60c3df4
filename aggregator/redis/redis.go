// Package redis keeps the global bucket of every key in Redis: throttling state that can be rebuilt, never the ledger.
package redis

import (
	"context"
	"crypto/sha1"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
)

// Config says where Redis is. URL is required; another zero field means its default.
type Config struct {
	URL       string        // redis://user:password@host:port/db or rediss://…; never shown in an error
	Cluster   bool          // URL names a node of a Redis Cluster: one key per script call
	Namespace string        // prefix of every key ("weir")
	Dial      time.Duration // for a connection (250ms)
	Timeout   time.Duration // for a reply (500ms: no request waits for it). What was sent may have been applied, and may be sent again
	Pipeline  int           // keys in one round trip (1000)
	PerCall   int           // keys in one script call, which holds Redis up for about 5 µs each (50; always 1 in a cluster)
	MaxLive   int           // keys in the index of live ones (200,000)
	Forgot    func()        // told when Redis is found to have forgotten everything, once each time; may be nil
}

// ErrUnreachable is wrapped by errors of a Redis that cannot be used at all: no connection, or a wrong user or password.
var ErrUnreachable = errors.New("redis is unreachable")

const (
	liveFor  = time.Minute // a mark in the index of live keys holds this long
	argsHead = 5           // arguments of a fold
	argsUse  = 10          // arguments of a use
)

// The client logs to standard error what it also returns.
func init() { redis.SetLogger(silent{}) }

type silent struct{}

func (silent) Printf(context.Context, string, ...any) {}

// What fold and take have in common goes before both.
var (
	//go:embed lua/bucket.lua
	bucketText string
	//go:embed lua/fold.lua
	foldText string
	//go:embed lua/take.lua
	takeText string
	//go:embed lua/epoch.lua
	epochText string
	//go:embed lua/memory.lua
	memoryText string

	foldSource   = bucketText + foldText
	takeScript   = redis.NewScript(bucketText + takeText)
	epochScript  = redis.NewScript(epochText)
	memoryScript = redis.NewScript(memoryText)
)

var foldSHA = func() string {
	sum := sha1.Sum([]byte(foldSource))
	return hex.EncodeToString(sum[:])
}()

// Counter is an aggregator.Counter over Redis.
type Counter struct {
	cfg  Config
	rdb  redis.UniversalClient
	addr string
	at   atomic.Int64 // µs of Redis' clock, the latest seen
	made atomic.Int64 // the same, of the note of Redis' memory that was seen last; 0 for none

	noted atomic.Int64 // count of the note of how far reports were folded, the last that we made; 0 for none
}

var _ aggregator.Counter = (*Counter)(nil)

// New returns a counter. It touches no network.
func New(cfg Config) (*Counter, error) {
	for _, d := range []struct{ field, value *time.Duration }{
		{&cfg.Dial, ptr(250 * time.Millisecond)}, {&cfg.Timeout, ptr(500 * time.Millisecond)},
	} {
		if *d.field == 0 {
			*d.field = *d.value
		}
	}
	if cfg.Namespace == "" {
		cfg.Namespace = "weir"
	}
	if strings.ContainsAny(cfg.Namespace, "{}") {
		return nil, fmt.Errorf("redis namespace %q: braces would become the hash tag", cfg.Namespace)
	}
	if cfg.Pipeline == 0 {
		cfg.Pipeline = 1000
	}
	if cfg.PerCall == 0 {
		cfg.PerCall = 50
	}
	if cfg.Cluster {
		cfg.PerCall = 1
	}
	if cfg.MaxLive == 0 {
		cfg.MaxLive = 200_000
	}
	o, err := redis.ParseURL(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("redis URL: %w", withoutURL(err))
	}
	// A retry by the client would run a script again after a lost reply. Ours bear that, but whoever retries should know it does.
	u := &redis.UniversalOptions{Addrs: []string{o.Addr}, DB: o.DB, Username: o.Username, Password: o.Password, TLSConfig: o.TLSConfig,
		MaxRetries: -1, DialTimeout: cfg.Dial, ReadTimeout: cfg.Timeout, WriteTimeout: cfg.Timeout, ContextTimeoutEnabled: true,
		DialerRetries: 1, PoolTimeout: time.Second, IsClusterMode: cfg.Cluster, DisableIdentity: true}
	if cfg.Cluster {
		u.MaxRedirects = 3
	}
	return &Counter{cfg: cfg, rdb: redis.NewUniversalClient(u), addr: o.Addr}, nil
}

func ptr[T any](v T) *T { return &v }

// withoutURL drops the URL, and the password in it, from an error of parsing it.
func withoutURL(err error) error {
	if e, ok := errors.AsType[*url.Error](err); ok {
		return e.Err
	}
	return err
}

// Close closes the connections.
func (c *Counter) Close() error { return c.rdb.Close() }

// Ping asks Redis for a sign of life.
func (c *Counter) Ping(ctx context.Context) error {
	if err := c.rdb.Ping(ctx).Err(); err != nil {
		return c.failed(err)
	}
	return nil
}

// Check asks Redis whether it can be used, and returns remarks on settings that would hurt. An error wraps ErrUnreachable.
func (c *Counter) Check(ctx context.Context) (remarks []string, err error) {
	if err := c.rdb.Ping(ctx).Err(); err != nil {
		return nil, c.failed(err)
	}
	settings, err := c.rdb.ConfigGet(ctx, "maxmemory-policy").Result()
	if err != nil {
		return []string{"redis: maxmemory-policy cannot be read (" + err.Error() + "); it must be noeviction"}, nil
	}
	if policy := settings["maxmemory-policy"]; policy != "noeviction" {
		remarks = append(remarks, "redis: maxmemory-policy is "+policy+": keys may be evicted, and an evicted bucket is a full one; set it to noeviction")
	}
	return remarks, nil
}

// failed tells an unusable Redis from one that refused something.
func (c *Counter) failed(err error) error {
	_, isReply := errors.AsType[redis.Error](err)
	switch text := err.Error(); {
	case strings.HasPrefix(text, "NOAUTH"), strings.HasPrefix(text, "WRONGPASS"), strings.Contains(text, "invalid username-password pair"),
		strings.HasPrefix(text, "ERR AUTH"), strings.Contains(text, "unauthenticated"):
		return fmt.Errorf("redis %s: %w: wrong or missing password", c.addr, ErrUnreachable)
	case !isReply:
		return fmt.Errorf("redis %s: %w: %w", c.addr, ErrUnreachable, err)
	}
	return fmt.Errorf("redis %s: %w", c.addr, err)
}

// tag names a key's bucket in Redis: any bytes, no braces, and no way for a key of one rule to look like one of another.
func tag(k aggregator.Key) string { return url.QueryEscape(k.Rule) + ":" + url.QueryEscape(k.Key) }

func untag(s string) (aggregator.Key, error) {
	rule, key, ok := strings.Cut(s, ":")
	if !ok {
		return aggregator.Key{}, fmt.Errorf("index of live keys: %q has no rule", s)
	}
	r, err1 := url.QueryUnescape(rule)
	k, err2 := url.QueryUnescape(key)
	return aggregator.Key{Rule: r, Key: k}, errors.Join(err1, err2)
}

// Name is the name of a key's hash, with one hash tag.
func (c *Counter) Name(k aggregator.Key) string { return c.cfg.Namespace + ":{" + tag(k) + "}" }

func (c *Counter) index() string { return c.cfg.Namespace + ":live" }

// Fold is aggregator.Counter. Folds of one key in one call are applied in order.
func (c *Counter) Fold(ctx context.Context, folds []aggregator.Fold) ([]aggregator.KeyState, error) {
	states := make([]aggregator.KeyState, len(folds))
	for lo := 0; lo < len(folds); lo += c.cfg.Pipeline {
		hi := min(lo+c.cfg.Pipeline, len(folds))
		if err := c.pipeline(ctx, folds[lo:hi], states[lo:hi]); err != nil {
			return nil, err
		}
	}
	return states, c.raise(ctx, folds, states)
}

// raise gives keys that are kept strictly and were not there, and so have begun empty, what they have earned.
func (c *Counter) raise(ctx context.Context, folds []aggregator.Fold, states []aggregator.KeyState) error {
	var again []aggregator.Fold
	var at []int
	for i := range folds {
		if folds[i].Strict && states[i].New {
			again = append(again, aggregator.Fold{Key: folds[i].Key, Limit: folds[i].Limit})
			at = append(at, i)
		}
	}
	if len(again) == 0 {
		return nil
	}
	since, now, err := c.memory(ctx)
	if err != nil {
		return err
	}
	for i := range again {
		level := states[at[i]].LevelMicros + earned(again[i].Limit, now-since, since)
		again[i].Bounds = &aggregator.Bounds{LeastMicros: level, MostMicros: math.MaxInt64 / 2}
	}
	raised, err := c.Fold(ctx, again)
	for i := range raised {
		to := &states[at[i]]
		raised[i].New = true
		*to = raised[i]
	}
	return err
}

// earned is the level in µtokens of a bucket that has earned for so many µs; since 0 it is full.
func earned(l aggregator.Limit, micros, since int64) int64 {
	l = bounded(l)
	full := l.Burst * 1e6
	if since == 0 {
		return full
	}
	return int64(min(float64(max(micros, 0))*float64(l.RateNanos)/1e9, float64(full)))
}

// bounded is a limit as the scripts take it.
func bounded(l aggregator.Limit) aggregator.Limit {
	return aggregator.Limit{RateNanos: min(max(l.RateNanos, 1), aggregator.MaxRateNanos), Burst: min(max(l.Burst, 0), aggregator.MaxBurst)}
}

// memory says since when Redis remembers, 0 for ever, and what its clock says.
func (c *Counter) memory(ctx context.Context) (since, now int64, err error) {
	seen := ""
	if made := c.made.Load(); made > 0 {
		seen = strconv.FormatInt(made, 10)
	}
	v, err := memoryScript.Run(ctx, c.rdb, []string{c.cfg.Namespace + ":memory"}, seen).Int64Slice()
	if err != nil {
		return 0, 0, fmt.Errorf("ask since when it remembers: %w", c.failed(err))
	}
	if was := c.made.Swap(v[1]); was > 0 && was != v[1] && c.cfg.Forgot != nil {
		c.cfg.Forgot()
	}
	return v[0], v[2], nil
}

// call is one run of the script over some folds.
type call struct {
	folds  []aggregator.Fold
	states []aggregator.KeyState
	args   []any // numkeys, keys and arguments
}

// pipeline folds in one round trip. The script's cache may be empty at any time, even between two commands: the first command
// brings the text, and what fails for want of it (only that) is sent again.
func (c *Counter) pipeline(ctx context.Context, folds []aggregator.Fold, states []aggregator.KeyState) error {
	size := c.cfg.PerCall
	calls := make([]call, 0, len(folds)/size+1)
	for lo := 0; lo < len(folds); lo += size {
		hi := min(lo+size, len(folds))
		calls = append(calls, call{folds[lo:hi], states[lo:hi], c.args(folds[lo:hi])})
	}
	for try := 0; len(calls) > 0; try++ {
		cmds := make([]redis.Cmder, len(calls))
		pipe := c.rdb.Pipeline()
		for i := range calls {
			args := calls[i].args
			args[0], args[1] = "evalsha", foldSHA
			if i == 0 || try > 0 {
				args[0], args[1] = "eval", foldSource
			}
			cmd := redis.NewSliceCmd(ctx, args...)
			cmd.SetFirstKeyPos(3)
			cmds[i] = cmd
			_ = pipe.Process(ctx, cmd) // queues
		}
		_, whole := pipe.Exec(ctx)
		var again []call
		for i, cmd := range cmds {
			err := cmd.Err()
			if err == nil && len(cmd.(*redis.SliceCmd).Val()) == 0 {
				err = whole // the connection was refused before any command went out
			}
			switch {
			case err == nil:
				if err := c.read(&calls[i], cmd.(*redis.SliceCmd).Val()); err != nil {
					return fmt.Errorf("fold: %w", err)
				}
			case try == 0 && strings.HasPrefix(err.Error(), "NOSCRIPT"):
				again = append(again, calls[i])
			default:
				return fmt.Errorf("fold: %w", c.failed(err))
			}
		}
		calls = again
	}
	return nil
}

// args are the arguments of one script call, from the command's name on.
func (c *Counter) args(folds []aggregator.Fold) []any {
	n := 3 + len(folds)*(1+argsHead)
	for i := range folds {
		n += len(folds[i].Uses) * argsUse
	}
	args := make([]any, 3, n)
	args[2] = len(folds)
	for i := range folds {
		args = append(args, c.Name(folds[i].Key))
	}
	for i := range folds {
		f := &folds[i]
		rate, burst := "", ""
		if f.Limit != (aggregator.Limit{}) {
			l := bounded(f.Limit)
			rate, burst = strconv.FormatInt(l.RateNanos, 10), strconv.FormatInt(l.Burst, 10)
		}
		args = append(args, rate, burst, f.Lag().Microseconds(), seldom(f), len(f.Uses))
		for j := range f.Uses {
			u := &f.Uses[j]
			inc := strconv.FormatUint(uint64(u.Incarnation), 10)
			demand := u.DemandNanos / 1000
			if u.DemandNanos > 0 {
				demand = max(demand, 1)
			}
			args = append(args, "c:"+u.Gateway+":"+u.Boot+":"+inc, u.Gateway, min(u.Seq, 1<<53-1), u.Cum, u.From, u.Settled,
				demand, u.SureNanos/1000, u.Span.Microseconds(), u.Window.Microseconds())
		}
	}
	return args
}

// seldom is what few folds have to say.
func seldom(f *aggregator.Fold) string {
	if f.Plain() {
		return ""
	}
	least, most, begin := "-", "-", "- -"
	if f.Bounds != nil {
		least, most = strconv.FormatInt(f.Bounds.LeastMicros, 10), strconv.FormatInt(f.Bounds.MostMicros, 10)
	}
	switch {
	case f.Strict:
		begin = "0 -" // see raise
	case f.Last != nil:
		begin = fmt.Sprint(f.Last.Micros, " ", f.Last.At)
	}
	return fmt.Sprintf("%d %d %s %s %s ", min(max(f.Outstanding, 0), aggregator.MaxBurst), min(max(f.Offered, 0), aggregator.MaxBurst), least, most, begin)
}

// read fills a call's states from the script's result.
func (c *Counter) read(to *call, result []any) error {
	if len(result) != len(to.folds)+1 {
		return fmt.Errorf("script returned %d states, want %d", len(result)-1, len(to.folds))
	}
	now, ok := result[0].(int64)
	if !ok {
		return fmt.Errorf("script returned %T as its time", result[0])
	}
	c.at.Store(now)
	for i := range to.folds {
		s := &to.states[i]
		s.Key, s.Limit, s.At = to.folds[i].Key, to.folds[i].Limit, now
		if result[i+1] == nil {
			continue // not there: version 0
		}
		if err := decode(s, result[i+1]); err != nil {
			return fmt.Errorf("state of %s %q: %w", s.Key.Rule, s.Key.Key, err)
		}
	}
	return nil
}

// decode reads one state; s.At is known.
func decode(s *aggregator.KeyState, v any) error {
	state, ok := v.([]any)
	if !ok || len(state) < 4 {
		return fmt.Errorf("script returned %T", v)
	}
	level, ok1 := state[0].(int64)
	version, ok2 := state[1].(int64)
	demands, ok3 := state[3].(string)
	if !ok1 || !ok2 || !ok3 {
		return fmt.Errorf("script returned %v", state)
	}
	s.LevelMicros, s.Version, s.Lost, s.New = level, uint64(version), state[2] == int64(1), state[2] == int64(2)
	if len(state) == 6 { // a look
		rate, _ := state[4].(string)
		burst, _ := state[5].(string)
		var err1, err2 error
		s.Limit.RateNanos, err1 = strconv.ParseInt(rate, 10, 64)
		s.Limit.Burst, err2 = strconv.ParseInt(burst, 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
	}
	if n := strings.Count(demands, " "); n > 0 {
		s.Demands = make([]aggregator.Demand, 0, n/3)
	}
	for one := range strings.SplitSeq(demands, ";") {
		if d, ok := demand(one, s.At); ok {
			s.Demands = append(s.Demands, d)
		}
	}
	return nil
}

// demand reads "gateway demand until since" as it is at now; one that has faded, or cannot be read, is none.
func demand(text string, now int64) (aggregator.Demand, bool) {
	gateway, rest, _ := strings.Cut(text, " ")
	var n [3]int64 // demand, until, since
	for i := range n {
		word, tail, _ := strings.Cut(rest, " ")
		v, err := strconv.ParseInt(word, 10, 64)
		if err != nil {
			return aggregator.Demand{}, false
		}
		n[i], rest = v, tail
	}
	rate := aggregator.Fade(n[0], now-n[1])
	if rate <= 0 {
		return aggregator.Demand{}, false
	}
	return aggregator.Demand{Gateway: gateway, RateNanos: min(rate, aggregator.MaxRateNanos/1000) * 1000, Since: n[2]}, true
}

// Take is aggregator.Counter: one script call for each, all in one round trip. A key that is not there costs two more: a Redis that was
// emptied has no full buckets.
func (c *Counter) Take(ctx context.Context, takes []aggregator.Take) ([]aggregator.Taken, error) {
	taken, missing, err := c.take(ctx, takes, func(*aggregator.Take) any { return "" })
	if err != nil || len(missing) == 0 {
		return taken, err
	}
	since, now, err := c.memory(ctx)
	if err != nil {
		return nil, err
	}
	again := make([]aggregator.Take, len(missing))
	for i, at := range missing {
		again[i] = takes[at]
	}
	late, _, err := c.take(ctx, again, func(t *aggregator.Take) any { return earned(t.Limit, now-since, since) })
	if err != nil {
		return nil, err
	}
	for i, at := range missing {
		taken[at] = late[i]
	}
	return taken, nil
}

// take takes; missing are those whose key is not there, which begin has no level for.
func (c *Counter) take(ctx context.Context, takes []aggregator.Take, begin func(*aggregator.Take) any) (taken []aggregator.Taken, missing []int, err error) {
	taken = make([]aggregator.Taken, len(takes))
	todo := make([]int, len(takes))
	for i := range todo {
		todo[i] = i
	}
	for try := 0; len(todo) > 0; try++ { // as in pipeline: what another node, or one whose cache was emptied, has no script for is sent again with it
		cmds := make([]*redis.Cmd, len(todo))
		pipe := c.rdb.Pipeline()
		for n, i := range todo {
			t := &takes[i]
			l := bounded(t.Limit)
			args := []any{strconv.FormatInt(l.RateNanos, 10), l.Burst, min(max(t.Cost, -aggregator.MaxBurst), aggregator.MaxBurst), begin(t)}
			if n == 0 || try > 0 {
				cmds[n] = takeScript.Eval(ctx, pipe, []string{c.Name(t.Key)}, args...)
			} else {
				cmds[n] = takeScript.EvalSha(ctx, pipe, []string{c.Name(t.Key)}, args...)
			}
		}
		_, whole := pipe.Exec(ctx)
		var again []int
		for n, i := range todo {
			v, err := cmds[n].Int64Slice()
			if err != nil && cmds[n].Err() == nil && whole != nil {
				err = whole // the connection was refused before any command went out
			}
			switch {
			case err != nil && try == 0 && strings.HasPrefix(err.Error(), "NOSCRIPT"):
				again = append(again, i)
			case err != nil:
				return nil, nil, fmt.Errorf("take: %w", c.failed(err))
			case len(v) == 0:
				missing = append(missing, i)
			case len(v) != 3:
				return nil, nil, fmt.Errorf("take of %s %q: script returned %v", takes[i].Key.Rule, takes[i].Key.Key, v)
			default:
				taken[i] = aggregator.Taken{OK: v[0] == 1, LevelMicros: v[1], Wait: time.Duration(v[2]) * time.Microsecond}
			}
		}
		todo = again
	}
	return taken, missing, nil
}

// Epoch is aggregator.Counter.
func (c *Counter) Epoch(ctx context.Context) (uint64, error) {
	n, err := epochScript.Run(ctx, c.rdb, []string{c.cfg.Namespace + ":epoch"}).Int64()
	if err != nil {
		return 0, fmt.Errorf("begin an epoch: %w", c.failed(err))
	}
	if _, _, err := c.memory(ctx); err != nil {
		return 0, err
	}
	return uint64(n), nil
}

// Mark is aggregator.Counter.
func (c *Counter) Mark(ctx context.Context, keys []aggregator.Key) error {
	now := c.at.Load() / 1000
	if now == 0 || len(keys) == 0 {
		return nil // nothing was ever folded
	}
	pipe := c.rdb.Pipeline()
	until := float64(now + liveFor.Milliseconds())
	for lo := 0; lo < len(keys); lo += c.cfg.Pipeline {
		part := keys[lo:min(lo+c.cfg.Pipeline, len(keys))]
		members := make([]redis.Z, len(part))
		for i, k := range part {
			members[i] = redis.Z{Score: until, Member: tag(k)}
		}
		pipe.ZAdd(ctx, c.index(), members...)
	}
	pipe.ZRemRangeByScore(ctx, c.index(), "-inf", strconv.FormatInt(now, 10))
	pipe.PExpire(ctx, c.index(), 2*liveFor)
	if _, err := pipe.Exec(ctx); err != nil {
		return fmt.Errorf("mark %d live keys: %w", len(keys), c.failed(err))
	}
	return nil
}

// Live is aggregator.Counter.
func (c *Counter) Live(ctx context.Context) ([]aggregator.KeyState, error) {
	tags, err := c.rdb.ZRevRange(ctx, c.index(), 0, int64(c.cfg.MaxLive)-1).Result()
	if err != nil {
		return nil, fmt.Errorf("read live keys: %w", c.failed(err))
	}
	folds := make([]aggregator.Fold, 0, len(tags))
	for _, t := range tags {
		key, err := untag(t)
		if err != nil {
			continue // not ours
		}
		folds = append(folds, aggregator.Fold{Key: key})
	}
	states, err := c.Fold(ctx, folds)
	if err != nil {
		return nil, fmt.Errorf("read live keys: %w", err)
	}
	there := states[:0]
	for _, s := range states {
		if s.Version > 0 {
			there = append(there, s)
		}
	}
	return there, nil
}

// Total is the number of tokens that all gateways have reported for a key while its bucket was remembered.
func (c *Counter) Total(ctx context.Context, k aggregator.Key) (int64, error) {
	n, err := c.rdb.HGet(ctx, c.Name(k), "n").Int64()
	if err != nil && !errors.Is(err, redis.Nil) {
		return 0, fmt.Errorf("read total of %s %q: %w", k.Rule, k.Key, c.failed(err))
	}
	return n, nil
}
