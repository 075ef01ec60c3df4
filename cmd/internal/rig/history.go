package rig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	natsgo "github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	goredis "github.com/redis/go-redis/v9"

	"github.com/weirhq/weir/aggregator"
	rediscounter "github.com/weirhq/weir/aggregator/redis"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

// drainWithin bounds the time from the last fault until everything is stored.
const drainWithin = 90 * time.Second

// Drain ends the gateways, which report what they have left, and waits until both readers of the stream have read it all.
func (r *Rig) Drain(names []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), drainWithin)
	defer cancel()
	var all sync.WaitGroup
	errs := make([]error, len(names))
	for i, name := range names {
		all.Go(func() { errs[i] = r.drainGateway(ctx, r.Weirs[name]) })
	}
	all.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	nc, err := natsgo.Connect(r.servers.nats)
	if err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return err
	}
	for {
		left, err := behind(ctx, js)
		if err == nil && left == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("not drained after %s: %s", drainWithin, left), err)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// drainGateway ends a gateway, which may leave reports in its spool, lets it deliver them in another life, and ends it again.
func (r *Rig) drainGateway(ctx context.Context, w *Weir) error {
	for life := range 2 {
		if err := w.Restart(); err != nil {
			return err
		}
		for life > 0 {
			left, err := r.Metric(w.name, "weir_ingest_pending_reports")
			if err == nil && left == 0 {
				break
			}
			select {
			case <-ctx.Done():
				return errors.Join(fmt.Errorf("%s has %.0f reports left after %s", w.name, left, drainWithin), err)
			case <-time.After(50 * time.Millisecond):
			}
		}
		if code, err := w.Term(); err != nil || code != 0 {
			return errors.Join(fmt.Errorf("%s ended with %d on SIGTERM", w.name, code), err)
		}
	}
	return nil
}

// AwaitReady waits until a weir says that it is ready.
func (r *Rig) AwaitReady(name string) error {
	client := http.Client{Timeout: 2 * time.Second}
	said := ""
	for deadline := time.Now().Add(drainWithin); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		resp, err := client.Get("http://" + r.metrics[name] + "/readyz")
		if err != nil {
			said = err.Error()
			continue
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if err == nil && resp.StatusCode == http.StatusOK {
			return nil
		}
		said = fmt.Sprintf("%s %s", resp.Status, body)
	}
	return fmt.Errorf("%s is not ready %s after all is well: %s", name, drainWithin, said)
}

// behind says what of the stream is not yet read.
func behind(ctx context.Context, js natsjs.JetStream) (string, error) {
	stream, err := js.Stream(ctx, schemas.UsageStream)
	if err != nil {
		return "", err
	}
	last := stream.CachedInfo().State.LastSeq
	kv, err := js.KeyValue(ctx, natsx.HistoryBucket)
	if err != nil {
		return "", err
	}
	var position struct{ Floor uint64 }
	entry, err := kv.Get(ctx, "history")
	if err != nil && !errors.Is(err, natsjs.ErrKeyNotFound) {
		return "", err
	}
	if err == nil {
		if err := json.Unmarshal(entry.Value(), &position); err != nil {
			return "", err
		}
	}
	if position.Floor < last {
		return fmt.Sprintf("history is at %d of %d", position.Floor, last), nil
	}
	consumer, err := stream.Consumer(ctx, "throttle")
	if err != nil {
		return "", err
	}
	if i := consumer.CachedInfo(); i.NumPending > 0 || i.NumAckPending > 0 {
		return fmt.Sprintf("throttling has %d messages to come and %d in hand", i.NumPending, i.NumAckPending), nil
	}
	return "", nil
}

// Dead is the number of messages that nobody could read.
func (r *Rig) Dead() (uint64, error) {
	nc, err := natsgo.Connect(r.servers.nats)
	if err != nil {
		return 0, err
	}
	defer nc.Close()
	js, err := natsjs.New(nc)
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	stream, err := js.Stream(ctx, schemas.DeadStream)
	if err != nil {
		return 0, err
	}
	return stream.CachedInfo().State.Msgs, nil
}

// Query asks ClickHouse for rows, without any of weir's code.
func (r *Rig) Query(sql string) ([][]string, error) {
	base, db, _ := strings.Cut(strings.TrimPrefix(r.servers.clickhouse, "http://"), "/")
	resp, err := http.Post("http://"+base+"/?database="+db, "text/plain", strings.NewReader(sql+" FORMAT JSONCompactEachRow"))
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		b, err := io.ReadAll(resp.Body)
		return nil, errors.Join(fmt.Errorf("%s: %s %s", sql, resp.Status, b), err)
	}
	var rows [][]string
	for dec := json.NewDecoder(resp.Body); ; {
		var row []string
		if err := dec.Decode(&row); errors.Is(err, io.EOF) {
			return rows, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", sql, err)
		}
		rows = append(rows, row)
	}
}

// Stored is what the history has, by cell and outcome.
func (r *Rig) Stored() (map[Cell]Outcomes, error) {
	rows, err := r.Query("SELECT gateway, tenant, route, rule, toString(sum(allowed) + sum(rejected)), toString(sum(if(rule = '', rejected, allowed))) FROM usage FINAL GROUP BY gateway, tenant, route, rule")
	if err != nil {
		return nil, err
	}
	all := map[Cell]Outcomes{}
	for _, row := range rows {
		if row[5] != "0" {
			return nil, fmt.Errorf("usage of %v has %s requests under the wrong outcome", row[:4], row[5])
		}
		n, err := strconv.ParseUint(row[4], 10, 64)
		if err != nil {
			return nil, err
		}
		c := Cell{row[0], row[1], row[2]}
		if all[c] == nil {
			all[c] = Outcomes{}
		}
		all[c][row[3]] += n
	}
	return all, nil
}

// Accounts are what the history has of each life of the contract rule's buckets.
func (r *Rig) Accounts() (map[Life]Account, error) {
	last := map[Life]uint64{} // report that told of the bucket
	all := map[Life]Account{}
	each := func(sql string, use func(l Life, seq uint64, n []uint64)) error {
		rows, err := r.Query(sql)
		for _, row := range rows {
			var n []uint64
			for _, text := range row[3:] {
				v, err := strconv.ParseUint(text, 10, 64)
				if err != nil {
					return err
				}
				n = append(n, v)
			}
			use(Life{row[0], row[1], row[2]}, n[0], n[1:])
		}
		return err
	}
	err := each("SELECT gateway, boot, tenant, toString(max(seq)), toString(argMax(cum, (seq, entry))) FROM tokens FINAL WHERE rule = 'contract' GROUP BY gateway, boot, tenant, key, incarnation",
		func(l Life, seq uint64, n []uint64) {
			a := all[l]
			a.Taken += n[0]
			all[l], last[l] = a, max(last[l], seq)
		})
	if err != nil {
		return nil, err
	}
	return all, each("SELECT gateway, boot, tenant, toString(seq), toString(sum(allowed)), toString(sumIf(rejected, layer = 'route')) FROM usage FINAL GROUP BY gateway, boot, tenant, seq",
		func(l Life, seq uint64, n []uint64) {
			a := all[l]
			if a.Admitted += n[0]; seq > last[l] {
				a.Late += n[0]
				a.Returned += n[1]
			}
			all[l] = a
		})
}

// RollUps are what the tables that are sums of usage should have and do not.
func (r *Rig) RollUps() (wrong []string, err error) {
	const sums = "SELECT tenant, route, rule, toString(sum(allowed)), toString(sum(rejected)), toString(sum(cost)) FROM %s GROUP BY tenant, route, rule ORDER BY tenant, route, rule"
	want, err := r.Query(fmt.Sprintf(sums, "usage FINAL"))
	if err != nil {
		return nil, err
	}
	for _, table := range []string{"usage_1m", "usage_1h", "usage_1d"} {
		have, err := r.Query(fmt.Sprintf(sums, table))
		if err != nil {
			return nil, err
		}
		if fmt.Sprint(have) != fmt.Sprint(want) {
			wrong = append(wrong, fmt.Sprintf("%s is not the sum of usage: have %v, want %v", table, have, want))
		}
	}
	return wrong, nil
}

// Totals are Redis' totals of the contract rule by tenant. A bucket that is full again is forgotten a minute later.
func (r *Rig) Totals() (map[string]uint64, error) {
	c, err := rediscounter.New(rediscounter.Config{URL: r.servers.redis, Dial: drainWithin, Timeout: drainWithin})
	if err != nil {
		return nil, err
	}
	defer func() { _ = c.Close() }()
	all := map[string]uint64{}
	key := strings.NewReplacer("%", "%25", "|", "%7C") // the two bytes that a key of one part escapes
	for i := range tenants {
		n, err := c.Total(context.Background(), aggregator.Key{Rule: "contract", Key: key.Replace(tenantName(i))})
		if err != nil {
			return nil, err
		}
		all[tenantName(i)] = uint64(n)
	}
	return all, nil
}

// FlushRedis has Redis forget everything, or only its scripts.
func (r *Rig) FlushRedis(onlyScripts bool) error {
	opt, err := goredis.ParseURL(r.servers.redis)
	if err != nil {
		return err
	}
	c := goredis.NewClient(opt)
	defer func() { _ = c.Close() }()
	if onlyScripts {
		return c.ScriptFlush(context.Background()).Err()
	}
	return c.FlushAll(context.Background()).Err()
}
