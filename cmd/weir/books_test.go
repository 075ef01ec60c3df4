package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	ch "github.com/ClickHouse/clickhouse-go/v2"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/ingest/jetstream"
	"github.com/weirhq/weir/ingest/spool"
	"github.com/weirhq/weir/internal/embedded/embeddedtest"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/schemas"
)

var quiet = slog.New(slog.DiscardHandler)

// pipeline is real servers and an aggregator, which is a command as well.
type pipeline struct {
	t     *testing.T
	flags []string // that name the servers
	js    natsjs.JetStream
	sql   ch.Conn
	hour  time.Time // whole; all that is published is in it or the one after it
}

func newPipeline(t *testing.T) *pipeline {
	t.Helper()
	p := &pipeline{t: t, hour: time.Now().UTC().Truncate(time.Hour)}
	natsURL, clickhouseURL := embeddedtest.NATS(t).URL(), embeddedtest.ClickHouse(t).URL()
	p.flags = []string{"--nats", natsURL, "--redis", embeddedtest.Redis(t).URL(), "--clickhouse", clickhouseURL, "--data", t.TempDir()}
	opt, err := ch.ParseDSN(clickhouseURL)
	if err != nil {
		t.Fatal(err)
	}
	if p.sql, err = ch.Open(opt); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.sql.Close() })
	nc, err := nats.Connect(natsURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	if p.js, err = natsjs.New(nc); err != nil {
		t.Fatal(err)
	}
	if _, stderr, code := weir(t, "migrate", "--clickhouse", clickhouseURL); code != exitOK {
		t.Fatalf("migrate: exit %d, %s", code, stderr)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan int, 1)
	var out, errOut bytes.Buffer
	go func() {
		ended <- execute(ctx, append([]string{"aggregator", "--metrics-addr", "127.0.0.1:0", "--log-level", "error"}, p.flags...), &out, &errOut)
	}()
	t.Cleanup(func() {
		cancel()
		if code := <-ended; code != exitOK {
			t.Errorf("aggregator: exit %d, %s", code, errOut.String())
		}
	})
	p.eventually("the streams are there", func() bool {
		_, err := p.js.Stream(t.Context(), schemas.DeadStream)
		return err == nil
	})
	return p
}

func (p *pipeline) eventually(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("not in time: %s", what)
		}
	}
}

// weir runs a command against the servers and checks its exit code.
func (p *pipeline) weir(want int, args ...string) (stdout, stderr string) {
	p.t.Helper()
	stdout, stderr, code := weir(p.t, append(slices.Clone(args), p.flags...)...)
	if code != want {
		p.t.Fatalf("weir %s: exit %d, want %d\n%s\n%s", strings.Join(args, " "), code, want, stdout, stderr)
	}
	return stdout, stderr
}

// json is weir with -o json, read into v, which knows every field.
func (p *pipeline) json(want int, v any, args ...string) {
	p.t.Helper()
	stdout, _ := p.weir(want, append(args, "-o", "json")...)
	if err := json.Unmarshal([]byte(stdout), v); err != nil {
		p.t.Fatalf("weir %s: %v in %q", strings.Join(args, " "), err, stdout)
	}
}

// wants checks that text has all of these.
func (p *pipeline) wants(text string, parts ...string) {
	p.t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			p.t.Errorf("%q lacks %q", text, part)
		}
	}
}

func (p *pipeline) exec(sql string) {
	p.t.Helper()
	if err := p.sql.Exec(p.t.Context(), sql); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
}

func (p *pipeline) number(sql string) (n uint64) {
	p.t.Helper()
	if err := p.sql.QueryRow(p.t.Context(), "SELECT toUInt64("+sql+")").Scan(&n); err != nil {
		p.t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// report is report seq of gateway gw: 2 requests of a tenant.
func report(tenant string, seq uint64) *schemas.Report {
	now := time.Now().UTC()
	return &schemas.Report{Gateway: "gw", Boot: "boot", Seq: seq, PolicyVersion: 7, SealedAt: now,
		Usage: []schemas.Usage{{Time: now, Tenant: tenant, Route: "orders", Allowed: 2, Cost: 2}},
		Tokens: []schemas.Tokens{{Rule: "contract", Key: "acme", Tenant: "acme", Mode: "enforce", RateNanos: 1e9, Capacity: 1000, LimitRateNanos: 1e9, LimitBurst: 1000,
			Taken: 2, Cum: 2 * seq, Window: time.Second}}}
}

func (p *pipeline) publish(tenant string, seqs ...uint64) {
	p.t.Helper()
	for _, seq := range seqs {
		body, err := schemas.EncodeReport(report(tenant, seq))
		if err != nil {
			p.t.Fatal(err)
		}
		p.raw(schemas.ContentProtobuf, body)
	}
}

func (p *pipeline) raw(contentType string, body []byte) {
	p.t.Helper()
	if _, err := p.js.PublishMsg(p.t.Context(), &nats.Msg{Subject: schemas.UsagePrefix + "gw", Data: body, Header: nats.Header{"Content-Type": {contentType}}}); err != nil {
		p.t.Fatal(err)
	}
}

func (p *pipeline) stored(n uint64) {
	p.t.Helper()
	p.eventually(fmt.Sprintf("%d reports are stored", n), func() bool { return p.number("(SELECT count() FROM reports FINAL)") == n })
}

// accounts is what is looked at of an answer of history verify.
type accounts struct {
	Equal       bool   `json:"equal"`
	Requests    uint64 `json:"requests"`
	Counts      int    `json:"counts"`
	Journals    int    `json:"journals"`
	Differences []struct {
		Between, Cause, Gateway, Boot string
		Want, Have                    int64
	} `json:"differences"`
}

func (p *pipeline) period() []string {
	return []string{"--from", p.hour.Format(time.RFC3339), "--to", p.hour.Add(2 * time.Hour).Format(time.RFC3339)}
}

func TestHistoryVerify(t *testing.T) {
	p := newPipeline(t)
	verify := append([]string{"history", "verify"}, p.period()...)
	p.publish("acme", 1, 2, 3)
	p.stored(3)
	var v accounts
	p.eventually("Redis has the counts", func() bool {
		out, _, _ := weir(t, append(append(slices.Clone(verify), "-o", "json"), p.flags...)...)
		v = accounts{}
		return json.Unmarshal([]byte(out), &v) == nil && v.Equal && v.Counts == 1
	})
	if v.Requests != 6 || v.Differences == nil || len(v.Differences) > 0 {
		t.Errorf("verify = %+v, want 6 requests and no differences", v)
	}
	out, stderr := p.weir(exitOK, verify...)
	if p.wants(out, "equal, with nothing to compare in journals: "+p.hour.Format(time.RFC3339)+" to ", "6 requests, 1 counts in Redis compared, 0 journals"); stderr != "" || strings.Count(out, "\n") != 1 {
		t.Errorf("%q, %q, want one line", out, stderr)
	}

	// An hour that is not over is left out, and looked at when there is no other.
	for last, present := range map[string]bool{"24h": false, "1s": true} {
		began := time.Now()
		var is struct{ From, To time.Time }
		out, stderr, _ := weir(t, append([]string{"history", "verify", "--last", last, "-o", "json"}, p.flags...)...)
		if err := json.Unmarshal([]byte(out), &is); err != nil {
			t.Fatalf("%v in %q, %q", err, out, stderr)
		}
		if present == is.To.Before(began) || !is.From.Equal(is.From.Truncate(time.Hour)) {
			t.Errorf("verify --last %s is about %s to %s", last, is.From, is.To)
		}
	}
	if out, _, _ := weir(t, "history", "verify", "--help"); !strings.Contains(out, "unless the time has no other: --last 1s takes it") {
		t.Errorf("verify --help does not say what --last 1s is about: %q", out)
	}

	p.publish("acme", 5) // and 4 is nowhere
	p.stored(4)
	out, stderr = p.weir(exitFailed, verify...)
	p.wants(out, "HOUR ", "BETWEEN", "CAUSE", "reports", "lost", "gw ", "boot ", "differences: ")
	p.wants(stderr, "different")
	v = accounts{}
	p.json(exitFailed, &v, verify...)
	if v.Equal || len(v.Differences) == 0 || v.Differences[0].Gateway != "gw" || v.Differences[0].Boot != "boot" {
		t.Errorf("verify = %+v", v)
	}

	// Its gateway has it still.
	journal := t.TempDir()
	kept, err := spool.Open(spool.Config{}, filepath.Join(journal, "gateways", "gw", "spool"), "gw", "boot", quiet, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(kept.Append(report("acme", 4)), kept.Commit(1), kept.Close()); err != nil {
		t.Fatal(err)
	}
	v = accounts{}
	p.json(exitFailed, &v, append(slices.Clone(verify), "--journal", journal)...)
	causes := map[string]bool{}
	for _, d := range v.Differences {
		causes[d.Cause] = true
	}
	if v.Journals != 1 || !causes["late"] || causes["lost"] {
		t.Errorf("verify --journal = %+v, want it late and not lost", v)
	}
	empty := t.TempDir()
	_, stderr = p.weir(exitUsage, append(slices.Clone(verify), "--journal", empty)...)
	p.wants(stderr, "--journal", empty)
	p.publish("acme", 4)
	p.stored(5)
	p.eventually("the accounts are equal", func() bool {
		_, _, code := weir(t, append(append(slices.Clone(verify), "--journal", journal), p.flags...)...)
		return code == exitOK
	})

	// Rebuild, and what verify says of a roll-up that is wrong.
	p.exec("INSERT INTO usage_1m SELECT * FROM usage_1m LIMIT 1")
	out, _ = p.weir(exitFailed, verify...)
	p.wants(out, "usage_1m", "lost or doubled")
	out, stderr = p.weir(exitOK, append([]string{"history", "rebuild"}, p.period()...)...)
	p.wants(out, "equal: ", "1 rows put right")
	p.wants(stderr, p.hour.Format(time.DateOnly)+": ")
	var rebuilt struct {
		Rows  uint64 `json:"rows"`
		Equal bool   `json:"equal"`
		Gaps  []any  `json:"gaps"`
	}
	p.json(exitOK, &rebuilt, append([]string{"history", "rebuild"}, p.period()...)...)
	if !rebuilt.Equal || rebuilt.Rows != 0 || rebuilt.Gaps == nil {
		t.Errorf("rebuild again = %+v, want nothing to do", rebuilt)
	}
	p.weir(exitOK, verify...)
	// A rebuild does not take away what the ledger has lost, and neither do tables that are gone end the night.
	p.exec("DELETE FROM usage WHERE seq = 3 SETTINGS mutations_sync = 2")
	out, stderr = p.weir(exitFailed, append([]string{"history", "rebuild"}, p.period()...)...)
	p.wants(out, "1 reports that arrived on ", " lack 2 requests in the ledger", "different: ", ", 0 rows put right")
	p.wants(stderr, "different")
	p.exec("DROP TABLE usage_1d")
	out, _ = p.weir(exitDegraded, "doctor")
	p.wants(out, "lacks usage_1d: run weir migrate")
	out, _ = p.weir(exitOK, "migrate")
	p.wants(out, "making usage_1d again", "usage_1d lacks", "weir history rebuild --from 1970-01-01T00:00:00Z", "the schema is at")
	out, _ = p.weir(exitFailed, "history", "rebuild", "--from", "1970-01-01T00:00:00Z")
	p.wants(out, " lack 2 requests in the ledger", "different: ")
	// A report whose row is missing is half stored: it is said, and left alone.
	p.exec("ALTER TABLE reports DELETE WHERE seq = 2 SETTINGS mutations_sync = 2")
	out, stderr = p.weir(exitFailed, append([]string{"history", "rebuild"}, p.period()...)...)
	p.wants(out, "1 reports are stored in part", "different: ")
	p.wants(stderr, "different")
}

func TestHistoryCorrect(t *testing.T) {
	p := newPipeline(t)
	p.publish("acme", 1, 2)
	p.stored(2)
	hour := p.hour
	if p.number("(SELECT count() FROM usage WHERE ts >= toDateTime64('"+hour.Format(time.DateTime)+"', 3, 'UTC') + INTERVAL 1 HOUR)") > 0 {
		hour = hour.Add(time.Hour) // the test began as an hour ended
	}
	correct := func(more ...string) []string {
		return append([]string{"history", "correct", "--gateway", "gw", "--tenant", "acme", "--route", "orders", "--hour", hour.Format(time.RFC3339),
			"--reason", "load test", "--by", "kim"}, more...)
	}
	for _, bad := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"history", "correct"}, exitUsage, "--gateway"},
		{[]string{"history", "correct", "--gateway", "gw", "--tenant", "acme", "--route", "orders", "--hour", "2026-11-29T10:00:00Z", "--reason", "x"}, exitUsage, "--by is required"},
		{correct("--hour", "noon"), exitUsage, `--hour "noon"`},
		{correct("--hour", hour.Add(time.Minute).Format(time.RFC3339), "--allowed", "-1"), exitUsage, "hour is "},
		{correct(), exitUsage, "changes nothing"},
		{correct("--rejected", "1"), exitUsage, "rule is empty"},
		{correct("--rule", "contract", "--allowed", "5"), exitUsage, `rule is "contract" though allowed is 5`},
		{correct("--gateway", "nosuch", "--allowed", "5"), exitFailed, `gateway is "nosuch"`},
		{correct("--allowed", "many"), exitUsage, "--allowed"},
		{correct("--allowed", "-1", "--reason", " "), exitUsage, "reason is empty"},
		{correct("--allowed", "-1", "-o", "xml"), exitUsage, `-o "xml"`},
		{correct("--allowed", "-1", "--hour", "9999-01-01T00:00:00Z"), exitUsage, "hour is 9999-01-01T00:00:00Z"},
		{correct("--allowed", "-1", "more"), exitUsage, `"more"`},
		{correct("--allowed", "-5"), exitFailed, "allowed -5 would be below zero, for 4 are on record"},
		{correct("--cost", "-5"), exitFailed, "cost -5"},
		{correct("--tenant", "acmee", "--allowed", "5"), exitFailed, `tenant is "acmee", of which nothing is on record`},
		{correct("--route", "order", "--allowed", "5"), exitFailed, `route is "order"`},
		{correct("--rule", "contrct", "--rejected", "5"), exitFailed, `rule is "contrct"`},
		{correct("--allowed", "-1", "--ref", "T-7 "), exitUsage, `ref is "T-7 ", with space around it`},
		{correct("--allowed", "-1", "--ref", " "), exitUsage, `ref is " "`},
		{correct("--allowed", "-1", "--ref", "T\x1b[2J"), exitUsage, `ref is "T\x1b[2J", with control characters`},
		{correct("--allowed", "-1", "--ref", "T\xff"), exitUsage, `ref is "T\xff", which is not valid UTF-8`},
		{correct("--allowed", "-1", "--by", "\tkim"), exitUsage, `by is "\tkim"`},
		{correct("--allowed", "-1", "--reason", "load\ntest"), exitUsage, `reason is "load\ntest", with control characters`},
		{correct("--allowed", "1", "--new", "--tenant", "a\x00"), exitUsage, `tenant is "a\x00", with control characters`},
		{correct("--allowed", "1", "--new", "--tenant", "a\xff"), exitUsage, "tenant is"},
		{correct("--allowed", "1", "--new", "--tenant", "acme "), exitFailed, `tenant is "acme "`},
		{correct("--allowed", "1", "--new", "--route", " orders"), exitFailed, `route is " orders"`},
		{correct("--allowed", "1", "--new", "--tenant", ""), exitFailed, `tenant is ""`},
	} {
		out, stderr := p.weir(bad.code, bad.args...)
		if p.wants(stderr, bad.says); out != "" {
			t.Errorf("weir %v wrote %q", bad.args, out)
		}
	}
	// A column that cannot hold it: doctor and migrate name it, and nothing is cut.
	p.exec("ALTER TABLE corrections MODIFY COLUMN allowed Int8 SETTINGS mutations_sync = 2")
	const narrow = "corrections.allowed is Int8 and should be Int64: ALTER TABLE corrections MODIFY COLUMN allowed Int64"
	out, _ := p.weir(exitDegraded, "doctor")
	p.wants(out, narrow)
	out, stderr := p.weir(exitFailed, "migrate")
	if p.wants(stderr, narrow); out != "" {
		t.Errorf("migrate wrote %q", out)
	}
	_, stderr = p.weir(exitFailed, correct("--allowed", "1000")...)
	if p.wants(stderr, "Int64 to Int8", "run weir migrate"); strings.Contains(stderr, "unknown") {
		t.Errorf("a correction that is not stored is %q", stderr)
	}
	p.exec("ALTER TABLE corrections MODIFY COLUMN allowed Int64 SETTINGS mutations_sync = 2")
	out, _ = p.weir(exitOK, correct("--allowed", "-1", "--cost", "-1", "--ref", "T-7")...)
	p.wants(out, "HOUR ", "REF", hour.Format(time.RFC3339), "T-7", "acme", "-1", "+0", "kim", "load test")
	again, _ := p.weir(exitOK, correct("--allowed", "-1", "--cost", "-1", "--ref", "T-7")...)
	if again != out {
		t.Errorf("the same again is %q, was %q", again, out)
	}
	_, stderr = p.weir(exitFailed, correct("--allowed", "-2", "--ref", "T-7")...)
	p.wants(stderr, "T-7")
	var made struct {
		Ref     string `json:"ref"`
		Allowed int64  `json:"allowed"`
		Cost    int64  `json:"cost"`
	}
	p.json(exitOK, &made, correct("--allowed", "3")...)
	if made.Ref == "" || made.Allowed != 3 || made.Cost != 3 {
		t.Errorf("correction = %+v, want a name for it, and a token for each request", made)
	}
	var bare struct {
		Cost int64 `json:"cost"`
	}
	for _, more := range []string{"1", "-1"} {
		if p.json(exitOK, &bare, correct("--rule", "contract", "--rejected", more, "--cost", "0", "--new", "--ref", "bare"+more)...); bare.Cost != 0 {
			t.Errorf("correction = %+v, want no cost", bare)
		}
	}
	out, _ = p.weir(exitOK, append([]string{"history", "corrections"}, p.period()...)...)
	p.wants(out, "T-7", made.Ref, "REASON")
	var all []struct {
		Ref    string `json:"ref"`
		Author string `json:"author"`
	}
	p.json(exitOK, &all, append([]string{"history", "corrections"}, p.period()...)...)
	if len(all) != 4 || all[0].Author != "kim" {
		t.Errorf("corrections = %+v, want 4", all)
	}
	var top []struct {
		Tenant  string `json:"tenant"`
		Allowed uint64 `json:"allowed"`
	}
	p.json(exitOK, &top, append([]string{"usage", "top"}, p.period()...)...)
	if len(top) != 1 || top[0].Tenant != "acme" || top[0].Allowed != 4-1+3 {
		t.Errorf("usage top = %+v, want the corrections in it", top)
	}
	// Verify is about what was reported.
	verified, _, _ := weir(t, append(append([]string{"history", "verify"}, p.period()...), p.flags...)...)
	p.wants(verified, ", 4 requests (corrections, apart: +2), ")
	var v struct{ Requests, Corrected int64 }
	if out, _, _ := weir(t, append(append([]string{"history", "verify", "-o", "json"}, p.period()...), p.flags...)...); json.Unmarshal([]byte(out), &v) != nil || v.Requests != 4 || v.Corrected != 2 {
		t.Errorf("verify = %+v, want 4 requests and 2 by corrections", v)
	}
	// Up to now, in hours of the clock, and what cannot have them.
	for _, q := range []struct {
		says  string // on standard error
		total uint64 // 0 when it depends on the second in which the reports were made
		steps uint64
		args  []string
	}{
		{"", 6, 6, []string{"--last", "24h", "--step", "1h"}},
		{"corrections are in the totals and not in the series", 6, 4, []string{"--last", "24h"}},
		{"4 corrections are left out", 0, 0, []string{"--from", hour.Add(time.Second).Format(time.RFC3339), "--to", hour.Add(2 * time.Hour).Format(time.RFC3339)}},
	} {
		stdout, stderr := p.weir(exitOK, append([]string{"usage", "tenant", "acme", "-o", "json"}, q.args...)...)
		var u struct {
			Allowed uint64 `json:"allowed"`
			Points  []struct {
				Allowed uint64 `json:"allowed"`
			} `json:"points"`
		}
		if err := json.Unmarshal([]byte(stdout), &u); err != nil {
			t.Fatal(err)
		}
		var steps uint64
		for _, x := range u.Points {
			steps += x.Allowed
		}
		if q.total != 0 && (u.Allowed != q.total || steps != q.steps) || !strings.HasPrefix(stderr, q.says) || q.says == "" && stderr != "" {
			t.Errorf("usage tenant %v: %d allowed, %d in the series, %q, want %+v", q.args, u.Allowed, steps, stderr, q)
		}
	}
	if _, stderr := p.weir(exitOK, "usage", "top", "--from", hour.Add(time.Second).Format(time.RFC3339), "--to", hour.Add(2*time.Hour).Format(time.RFC3339)); !strings.HasPrefix(stderr, "4 corrections are left out") {
		t.Errorf("usage top of a part of the hour says %q", stderr)
	}
	for range 2 { // what a correction has made known is known
		for _, n := range []string{"2", "-2"} {
			p.weir(exitOK, correct("--tenant", "newcomer", "--allowed", n, "--new", "--ref", "new"+n)...)
		}
	}
	p.weir(exitFailed, correct("--tenant", "newcomer", "--route", "other", "--allowed", "1")...)
}

// Whatever name a report has for a tenant, it can be corrected under it.
func TestHistoryCorrectOfOddNames(t *testing.T) {
	p := newPipeline(t)
	for i, tenant := range []string{"", " acme "} {
		p.publish(tenant, uint64(i+1))
		p.stored(uint64(i + 1))
		hour := time.UnixMilli(int64(p.number(fmt.Sprintf("(SELECT toUnixTimestamp64Milli(max(ts)) FROM usage WHERE tenant = '%s')", tenant)))).UTC().Truncate(time.Hour)
		correct := []string{"history", "correct", "--gateway", "gw", "--route", "orders", "--hour", hour.Format(time.RFC3339), "--reason", "load test", "--by", "kim", "--allowed", "-1"}
		p.weir(exitOK, append(correct, "--tenant", tenant)...)
		if n := p.number(fmt.Sprintf("(SELECT sum(allowed) FROM corrected_1h WHERE tenant = '%s')", tenant)); n != 1 {
			t.Errorf("tenant %q has %d requests, want 1", tenant, n)
		}
		_, stderr := p.weir(exitUsage, correct...)
		p.wants(stderr, "--tenant is required")
	}
}

func TestDeadLetterCommands(t *testing.T) {
	p := newPipeline(t)
	out, _ := p.weir(exitOK, "dlq", "list")
	p.wants(out, "ID ", "REASON", "LETTERS")
	var list struct {
		Counts  map[string]uint64 `json:"counts"`
		Letters []struct {
			ID      uint64 `json:"id"`
			Reason  string `json:"reason"`
			Subject string `json:"subject"`
			Detail  string `json:"detail"`
		} `json:"letters"`
	}
	if p.json(exitOK, &list, "dlq", "list"); list.Counts == nil || list.Letters == nil || len(list.Letters) > 0 {
		t.Errorf("dlq list = %+v, want none, as values", list)
	}

	p.exec("ALTER TABLE usage ADD CONSTRAINT never CHECK tenant != 'poison'")
	p.raw(schemas.ContentJSON, []byte(`{"boot":`))
	p.publish("poison", 1)
	p.publish("acme", 2, 3)
	p.stored(2)
	p.eventually("two letters", func() bool {
		p.json(exitOK, &list, "dlq", "list")
		return len(list.Letters) == 2
	})
	if list.Counts["malformed"] != 1 || list.Counts["refused"] != 1 || list.Letters[0].Subject != "weir.usage.v1.gw" || list.Letters[0].Detail == "" {
		t.Errorf("dlq list = %+v", list)
	}
	id := map[string]string{}
	for _, l := range list.Letters {
		id[l.Reason] = fmt.Sprint(l.ID)
	}
	out, _ = p.weir(exitOK, "dlq", "list")
	p.wants(out, "malformed", "refused", "weir.usage.v1.gw", "Constraint")
	out, _ = p.weir(exitOK, "dlq", "list", "--reason", "refused", "-n", "1")
	if table, _, _ := strings.Cut(out, "LETTERS"); strings.Contains(table, "malformed") {
		t.Errorf("dlq list --reason refused shows %q", out)
	}
	out, _ = p.weir(exitOK, "dlq", "show", id["refused"])
	p.wants(out, "reason ", "refused", "report ", "poison", "arrived ")
	out, _ = p.weir(exitOK, "dlq", "show", id["malformed"])
	p.wants(out, "body ", "boot")
	var letter struct {
		Body   []byte `json:"body"`
		Stream string `json:"stream"`
	}
	if p.json(exitOK, &letter, "dlq", "show", id["malformed"]); string(letter.Body) != `{"boot":` || letter.Stream != schemas.UsageStream {
		t.Errorf("dlq show = %+v", letter)
	}

	// What still cannot be taken comes back as another letter; then it can, and counts once however often it is replayed.
	p.weir(exitOK, "dlq", "replay", id["refused"])
	p.eventually("it is a letter again", func() bool {
		p.json(exitOK, &list, "dlq", "list", "--reason", "refused")
		return len(list.Letters) == 1 && fmt.Sprint(list.Letters[0].ID) != id["refused"]
	})
	p.exec("ALTER TABLE usage DROP CONSTRAINT never")
	again := fmt.Sprint(list.Letters[0].ID)
	out, _ = p.weir(exitOK, "dlq", "replay", again)
	p.wants(out, "replay: 1 of 1 letters")
	p.stored(3)
	_, stderr := p.weir(exitFailed, "dlq", "replay", again)
	p.wants(stderr, again, "no such dead letter")
	p.publish("poison", 1) // as a replay outside the duplicate window
	p.publish("acme", 4)
	p.stored(4)
	if n := p.number("(SELECT sum(allowed) FROM usage_1h WHERE tenant = 'poison')"); n != 2 {
		t.Errorf("%d requests of the replayed report are stored, want 2", n)
	}
	var results []struct {
		ID    uint64 `json:"id"`
		Done  bool   `json:"done"`
		Error string `json:"error"`
	}
	if p.json(exitFailed, &results, "dlq", "replay", "9999", again); len(results) != 2 || results[0].Done || results[0].Error == "" {
		t.Errorf("dlq replay = %+v", results)
	}

	out, _ = p.weir(exitOK, "dlq", "drop", "--all", "--reason", "malformed")
	p.wants(out, "drop: 1 of 1 letters")
	p.raw(schemas.ContentJSON, []byte(`{"boot":`))
	p.eventually("a letter", func() bool {
		p.json(exitOK, &list, "dlq", "list")
		return len(list.Letters) == 1
	})
	twice := fmt.Sprint(list.Letters[0].ID)
	out, _ = p.weir(exitOK, "dlq", "drop", twice, "0"+twice)
	p.wants(out, "drop: 1 of 1 letters")
	out, stderr = p.weir(exitFailed, "dlq", "drop", id["malformed"]) // gone already
	p.wants(out, "drop: 0 of 1 letters", "no such dead letter")
	p.wants(stderr, "no such dead letter")
	p.weir(exitOK, "dlq", "drop", "--all")
	if p.json(exitOK, &list, "dlq", "list"); len(list.Letters) != 0 {
		t.Errorf("dlq list = %+v, want none", list)
	}
}

// What is wrong with a command line is said before any server is asked, and names the flag; and every command shows an
// example.
func TestBooksUsageErrors(t *testing.T) {
	for _, bad := range []struct {
		says string
		args []string
	}{
		{"--from", []string{"history", "verify", "--from", "yesterday"}},
		{"--to", []string{"history", "verify", "--to", "now"}},
		{"--last", []string{"history", "verify", "--last", "-1h"}},
		{"--from", []string{"history", "rebuild", "--from", "2026-11-02T00:00:00Z", "--to", "2026-11-01T00:00:00Z"}},
		{"-o", []string{"history", "rebuild", "-o", "xml"}},
		{"-o", []string{"history", "corrections", "-o", "yaml"}},
		{`"x"`, []string{"history", "corrections", "x"}},
		{`"x"`, []string{"history", "x"}},
		{"One of", []string{"history"}},
		{"One of", []string{"dlq"}},
		{"-n 0", []string{"dlq", "list", "-n", "0"}},
		{"--reason", []string{"dlq", "list", "--reason", ">"}},
		{"-o", []string{"dlq", "list", "-o", "xml"}},
		{"seven", []string{"dlq", "show", "seven"}},
		{`weir: no dead letter has the id "0": see`, []string{"dlq", "show", "0"}},
		{`the id "0"`, []string{"dlq", "drop", "0"}},
		{"id", []string{"dlq", "show"}},
		{"--all", []string{"dlq", "replay"}},
		{"--all", []string{"dlq", "replay", "--all", "7"}},
		{"--all", []string{"dlq", "drop", "7", "--reason", "refused"}},
		{"--reason", []string{"dlq", "drop", "--all", "--reason", "a.b"}},
		{"--step", []string{"usage", "tenant", "acme", "--step", "0s"}},
		{"--step", []string{"usage", "curve", "--rule", "r", "--step", "1ns"}},
	} {
		if out, stderr, code := weir(t, bad.args...); code != exitUsage || out != "" || !strings.Contains(stderr, bad.says) {
			t.Errorf("weir %v: exit %d, %q, %q, want a usage error that says %s", bad.args, code, out, stderr, bad.says)
		}
	}
	for _, path := range []string{"history", "history verify", "history rebuild", "history correct", "history corrections", "dlq", "dlq list", "dlq show", "dlq replay", "dlq drop",
		"usage", "usage top", "usage tenant", "usage curve"} {
		out, stderr, code := weir(t, append(strings.Fields(path), "--help")...)
		_, example, _ := strings.Cut(out, "Examples:")
		if code != exitOK || stderr != "" || !strings.Contains(example, "weir "+path) {
			t.Errorf("weir %s --help: exit %d, %q, %q, want an example of it", path, code, out, stderr)
		}
	}
}

// A server that is not there is named, with exit code 3.
func TestBooksUnreachable(t *testing.T) {
	const nobody = "127.0.0.1:1"
	natsURL, redisURL, clickhouseURL := embeddedtest.NATS(t).URL(), embeddedtest.Redis(t).URL(), embeddedtest.ClickHouse(t).URL()
	if _, stderr, code := weir(t, "migrate", "--clickhouse", clickhouseURL); code != exitOK {
		t.Fatalf("migrate: exit %d, %s", code, stderr)
	}
	nc, err := nats.Connect(natsURL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := natsjs.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := natsx.Declare(t.Context(), js, natsx.Storage{}); err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	all := func(n, r, c string) []string {
		return []string{"--nats", n, "--redis", r, "--clickhouse", c, "--data", data}
	}
	correct := []string{"history", "correct", "--gateway", "g", "--tenant", "t", "--route", "r", "--hour", "2026-11-29T10:00:00Z", "--allowed", "1", "--reason", "r", "--by", "b"}
	for _, down := range []struct {
		args  []string
		flags []string
	}{
		{[]string{"history", "verify"}, all(natsURL, redisURL, "http://"+nobody+"/weir")},
		{[]string{"history", "verify"}, all("nats://"+nobody, redisURL, clickhouseURL)},
		{[]string{"history", "verify"}, all(natsURL, "redis://"+nobody, clickhouseURL)},
		{[]string{"history", "rebuild"}, all(natsURL, redisURL, "http://"+nobody+"/weir")},
		{[]string{"history", "corrections"}, all(natsURL, redisURL, "clickhouse://"+nobody+"/weir")},
		{correct, all(natsURL, redisURL, "http://"+nobody+"/weir")},
		{[]string{"dlq", "list"}, all("nats://"+nobody, redisURL, clickhouseURL)},
		{[]string{"dlq", "show", "1"}, all("nats://"+nobody, redisURL, clickhouseURL)},
		{[]string{"dlq", "replay", "1"}, all("nats://"+nobody, redisURL, clickhouseURL)},
		{[]string{"dlq", "drop", "1"}, all("nats://"+nobody, redisURL, clickhouseURL)},
	} {
		t.Run("", func(t *testing.T) {
			t.Parallel() // some try for seconds
			if out, stderr, code := weir(t, append(slices.Clone(down.args), down.flags...)...); code != exitUnreachable || out != "" || !strings.Contains(stderr, nobody) {
				t.Errorf("weir %v %v: exit %d, %q, %q, want 3 and its address", down.args, down.flags, code, out, stderr)
			}
		})
	}
}

// What somebody else took out after --all had listed it is no failure, and is not said to be done; named, it is one.
func TestLettersThatOthersTook(t *testing.T) {
	take := func(_ *jetstream.DeadLetters, _ *cobra.Command, id uint64) error {
		if id == 2 {
			return fmt.Errorf("dead letter 2: %w", jetstream.ErrNoLetter)
		}
		return nil
	}
	for _, c := range []struct {
		all        bool
		text, json string
	}{
		{true, "replay: 2 of 3 letters, 1 were gone already\n", `{"id":2,"done":false,"gone":true}`},
		{false, "2  dead letter 2: there is no such dead letter\nreplay: 2 of 3 letters\n", `{"id":2,"done":false,"error":"dead letter 2: there is no such dead letter"}`},
	} {
		for format, want := range map[string]string{"table": c.text, "json": c.json} {
			var b letterBox
			cmd := &cobra.Command{}
			b.bind(cmd)
			if err := cmd.Flags().Set("output", format); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			cmd.SetOut(&out)
			cmd.SetContext(t.Context())
			err := eachLetter(cmd, &b, nil, "replay", []uint64{1, 2, 3}, c.all, take)
			got := out.String()
			if format == "json" {
				var flat bytes.Buffer
				if err := json.Compact(&flat, []byte(got)); err != nil {
					t.Fatal(err)
				}
				got = flat.String()
			}
			if !strings.Contains(got, want) || (err == nil) != c.all {
				t.Errorf("--all %t as %s: %q, %v, want %q", c.all, format, got, err, want)
			}
		}
	}
}

// A table stays readable when every second report is missing.
func TestVerifyTableIsBounded(t *testing.T) {
	r := app.Reconciliation{Differences: []app.Difference{{Between: "usage", Cause: app.CauseDoubled, Gateway: "gw", Boot: "b", Detail: "first"}}}
	for i := range 1000 {
		r.Differences = append(r.Differences, app.Difference{Between: "reports", Cause: app.CauseLost, Gateway: "gw", Boot: "b", Want: 1, Detail: fmt.Sprintf("report %d", 2*i+1)})
	}
	r.Differences = append(r.Differences, app.Difference{Between: "reports", Cause: app.CauseLost, Gateway: "gw", Boot: "c", Want: 1, Detail: "last"})
	var out strings.Builder
	printReconciliation(&out, r)
	got := out.String()
	for _, want := range []string{"first", "\treport 99\n", "… and 950 more of these: -o json has them\n", "last", "1002 differences: "} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
	if n := strings.Count(got, "\n"); n != 1+1+50+1+1+1 {
		t.Errorf("the table has %d lines, want 55", n)
	}
}

// A process can have ended so without anybody's having killed it.
func TestVerifySaysOfAnEndedProcessWhatIsKnown(t *testing.T) {
	var out strings.Builder
	printReconciliation(&out, app.Reconciliation{Equal: true, Killed: []app.Untold{{Gateway: "gw", Boot: "b", Tenants: 2, Tokens: 7}}})
	if got := out.String(); !strings.Contains(got, "gw, boot b, ended before it had sealed all that it counted: Redis never heard of up to 7 tokens") || strings.Contains(got, "killed") {
		t.Errorf("verify says %q", got)
	}
}
