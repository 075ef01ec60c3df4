package schemas

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/weirhq/weir/schemas/weirpb"
)

var update = flag.Bool("update", false, "rewrite testdata/v1")

var arrived = time.Date(2026, 11, 29, 10, 0, 1, 0, time.UTC)

const subject = UsagePrefix + "gw-1"

// whole is a report with every field set.
func whole() *Report {
	at := arrived.Add(-900 * time.Millisecond)
	return &Report{
		Gateway: "gw-1", Boot: "01JDQ7Z9", Seq: 7, PolicyVersion: 3, SealedAt: arrived.Add(-time.Millisecond),
		Usage: []Usage{
			{Time: at, Tenant: "acme", Route: "export", Allowed: 41, Cost: 43},
			{Time: at, Tenant: "ключ", Route: "export", Rule: "contract", Layer: "contract", Rejected: 2, Cost: 2},
		},
		Tokens: []Tokens{{Rule: "contract", Layer: "contract", Key: "acme", Tenant: "acme", Mode: "enforce", RateNanos: 26_666_666_666, Capacity: 53,
			LimitRateNanos: 80_000_000_000, LimitBurst: 160, Taken: 43, Refused: 2, Cum: 1043, Incarnation: 2, TokensMin: -3, TokensLast: 5, Window: 100 * time.Millisecond,
			Granted: 17, Consistency: "lease"}},
		Rejections: []Rejection{{Time: at, Tenant: "acme", Route: "export", Rule: "contract", Layer: "contract", Method: "GET", Path: "/report/export/a",
			Client: "198.18.0.0/24", RetryAfterMS: 1500, Instance: "01JDQ7ZA"}},
	}
}

// Every field is set in whole, so that a field that a codec forgets shows.
func TestNoFieldIsForgotten(t *testing.T) {
	check := func(v reflect.Value) {
		for i := range v.NumField() {
			if v.Field(i).IsZero() {
				t.Errorf("%s.%s is not set in the fixture", v.Type(), v.Type().Field(i).Name)
			}
		}
	}
	r := whole()
	check(reflect.ValueOf(*r))
	u := r.Usage[1]
	u.Allowed = 1
	check(reflect.ValueOf(u))
	check(reflect.ValueOf(r.Tokens[0]))
	check(reflect.ValueOf(r.Rejections[0]))
}

// Golden: what was ever published can be read for ever, and means the same.
func TestReleasedFixtures(t *testing.T) {
	r := whole()
	pb, err := EncodeReport(r)
	if err != nil {
		t.Fatal(err)
	}
	js, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	u := &ThrottleUpdate{Gateways: 3, TTL: 5 * time.Second, Snapshot: true, Epoch: 6, Frozen: true, Weight: 250_000, Shares: []Share{{Rule: "contract", Key: "acme", Version: 9, RateNanos: 1, Burst: 2, LimitRateNanos: 3, LimitBurst: 4, Reason: "demand", Level: -7, Granted: 11, Grant: 13}}}
	upb, err := EncodeThrottleUpdate(u)
	if err != nil {
		t.Fatal(err)
	}
	h := &Heartbeat{Gateway: "gw-1", Boot: "b", SentAt: arrived, PolicyVersion: 3, Mode: "synced", ClockOffset: -time.Second, ClockError: time.Millisecond, ClockKnown: true, PendingReports: 4, Version: "v1", Without: []string{WithoutSpool}}
	hpb, err := EncodeHeartbeat(h)
	if err != nil {
		t.Fatal(err)
	}
	c := ClockReply{Received: arrived, Sent: arrived.Add(time.Microsecond)}
	cpb, err := EncodeClockReply(c)
	if err != nil {
		t.Fatal(err)
	}
	a := &Alert{Type: AlertResolved, Name: "low-tokens", Severity: SeverityWarning, DedupKey: "k", Tenant: "acme", Rule: "contract", Key: "acme", Gateway: "gw-1",
		Summary: "s", Value: 0.5, Threshold: 5, StartsAt: arrived, EndsAt: arrived.Add(time.Minute)}
	ajs, err := EncodeAlert(a)
	if err != nil {
		t.Fatal(err)
	}
	for name, now := range map[string][]byte{"report.pb": pb, "report.json": append(js, '\n'), "throttle.pb": upb, "heartbeat.pb": hpb, "clock.pb": cpb, "alert.json": append(ajs, '\n')} {
		path := filepath.Join("testdata", "v1", name)
		if *update {
			if err := os.WriteFile(path, now, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		was, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(was, now) {
			t.Errorf("%s is encoded differently than when it was released", name)
		}
		var got, want any
		switch name {
		case "report.pb":
			got, err = DecodeReport(subject, ContentProtobuf, was, arrived)
			want = r
		case "report.json":
			got, err = DecodeReport(subject, ContentJSON, was, arrived)
			want = r
		case "throttle.pb":
			got, err = DecodeThrottleUpdate(was)
			want = u
		case "heartbeat.pb":
			got, err = DecodeHeartbeat(HeartbeatPrefix+"gw-1", was)
			want = h
		case "clock.pb":
			got, err = DecodeClockReply(was)
			want = c
		case "alert.json":
			got, err = DecodeAlert(was)
			want = a
		}
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s = %+v, %v, want %+v", name, got, err, want)
		}
	}
}

// What a gateway has sealed is told to who understands it; a number that nobody has sealed is refused. The released fixture, which tells
// of nothing, is an older gateway's.
func TestHeartbeatTellsWhatIsSealed(t *testing.T) {
	for sealed, ok := range map[uint64]bool{0: true, 7: true, MaxCount: true, MaxCount + 1: false, math.MaxUint64: false} {
		b, err := EncodeHeartbeat(&Heartbeat{Boot: "b", Sealed: sealed})
		if err != nil {
			t.Fatal(err)
		}
		switch h, err := DecodeHeartbeat(HeartbeatPrefix+"gw-1", b); {
		case ok && (err != nil || h.Sealed != sealed):
			t.Errorf("sealed %d comes as %+v, %v", sealed, h, err)
		case !ok && (err == nil || !strings.Contains(err.Error(), "gw-1: sealed is")):
			t.Errorf("sealed %d: %v, want it refused", sealed, err)
		}
	}
}

// The smallest useful report of the contract.
const smallest = `{"boot":"01J0","seq":7,"usage":[{"ts":"2026-11-29T10:00:00.100Z","tenant":"acme","route":"export","allowed":41,"rejected":2,"rule":"contract"}]}`

func TestSmallestJSONReport(t *testing.T) {
	for _, content := range []string{ContentJSON, ContentJSON + "; charset=utf-8", ""} {
		r, err := DecodeReport(subject, content, []byte(smallest), arrived)
		if err != nil {
			t.Fatal(err)
		}
		at := time.Date(2026, 11, 29, 10, 0, 0, 100e6, time.UTC)
		want := &Report{Gateway: "gw-1", Boot: "01J0", Seq: 7, Usage: []Usage{
			{Time: at, Tenant: "acme", Route: "export", Rule: "contract", Rejected: 2, Cost: 2},
			{Time: at, Tenant: "acme", Route: "export", Allowed: 41, Cost: 41},
		}}
		if !reflect.DeepEqual(r, want) || r.Requests() != 43 {
			t.Errorf("with %q: %+v, want %+v", content, r, want)
		}
	}
}

// An entry with both outcomes becomes two, and nothing of its requests or cost is lost.
func TestEntriesComeBackNormal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := func(name string, max uint64) uint64 { return rapid.Uint64Range(0, max).Draw(t, name) }
		u := Usage{Rule: "r", Layer: "l", Allowed: n("allowed", MaxReportRequests), Rejected: n("rejected", MaxReportRequests), Cost: n("cost", MaxReportCost)}
		cost := u.Cost
		if cost == 0 {
			cost = u.Allowed + u.Rejected
		}
		var got Usage
		for _, e := range normal([]Usage{u}) {
			if e.Allowed > 0 && e.Rejected > 0 {
				t.Fatalf("%+v has two outcomes", e)
			}
			if e.Rejected == 0 && (e.Rule != "" || e.Layer != "") {
				t.Fatalf("%+v was allowed by a rule", e)
			}
			got.Allowed += e.Allowed
			got.Rejected += e.Rejected
			got.Cost += e.Cost
		}
		if got.Allowed != u.Allowed || got.Rejected != u.Rejected || got.Cost != cost {
			t.Fatalf("%+v adds up to %+v", u, got)
		}
	})
}

// random draws a valid report whose entries are normal already.
func random(t *rapid.T) *Report {
	legible := rapid.Rune().Filter(func(r rune) bool { return !unicode.IsControl(r) })
	text := func(name string) string { return rapid.StringOfN(legible, 0, -1, MaxTextBytes).Draw(t, name) }
	count := func(name string) uint64 { return rapid.Uint64Range(0, MaxCount).Draw(t, name) }
	part := func(name string, all uint64) uint64 { return rapid.Uint64Range(0, all/5).Draw(t, name) } // of five entries
	at := func(name string) time.Time {
		return arrived.Add(time.Duration(rapid.Int64Range(-int64(MaxBehind), int64(MaxAhead)).Draw(t, name)))
	}
	r := &Report{Gateway: "gw-1", Boot: rapid.StringMatching(`[0-9A-Za-z_-]{1,64}`).Draw(t, "boot"), Seq: rapid.Uint64Range(1, MaxCount).Draw(t, "seq"), PolicyVersion: rapid.Uint64().Draw(t, "policy")}
	if rapid.Bool().Draw(t, "sealed") {
		r.SealedAt = at("sealed_at")
	}
	for range rapid.IntRange(0, 5).Draw(t, "usage") {
		u := Usage{Time: at("ts"), Tenant: text("tenant"), Route: text("route")}
		if rapid.Bool().Draw(t, "refused") {
			u.Rule, u.Layer, u.Rejected = "r"+rapid.StringOfN(legible, 0, 10, 100).Draw(t, "rule"), text("layer"), max(part("rejected", MaxReportRequests), 1)
		} else {
			u.Allowed = part("allowed", MaxReportRequests)
		}
		if u.Cost = part("cost", MaxReportCost); u.Cost == 0 || u.Allowed+u.Rejected == 0 {
			u.Cost = u.Allowed + u.Rejected
		}
		r.Usage = append(r.Usage, u)
	}
	i64 := func(name string, min int64) int64 { return rapid.Int64Min(min).Draw(t, name) }
	for range rapid.IntRange(0, 5).Draw(t, "tokens") {
		r.Tokens = append(r.Tokens, Tokens{Rule: "r" + rapid.StringOfN(legible, 0, 10, 100).Draw(t, "rule"), Layer: text("layer"), Key: strings.ReplaceAll(text("key"), "%", ""), Tenant: text("tenant"),
			Mode: rapid.SampledFrom([]string{"", "enforce", "shadow"}).Draw(t, "mode"), RateNanos: i64("rate", -1), Capacity: i64("capacity", 0), LimitRateNanos: i64("limit", -1),
			LimitBurst: i64("burst", 0), Taken: count("taken"), Refused: count("refused"), Cum: count("cum"), Incarnation: rapid.Uint32().Draw(t, "inc"),
			TokensMin: i64("min", math.MinInt64), TokensLast: i64("last", math.MinInt64), Window: time.Duration(i64("window", 0))})
	}
	for range rapid.IntRange(0, 5).Draw(t, "rejections") {
		r.Rejections = append(r.Rejections, Rejection{Time: at("ts"), Tenant: text("tenant"), Route: text("route"), Rule: text("rule"), Layer: text("layer"), Method: text("method"),
			Path: text("path"), Client: text("client"), RetryAfterMS: i64("retry", math.MinInt64), Instance: text("instance")})
	}
	return r
}

func TestReportRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := random(t)
		pb, err := EncodeReport(r)
		if err != nil {
			t.Fatal(err)
		}
		js, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		for content, body := range map[string][]byte{ContentProtobuf: pb, ContentJSON: js} {
			got, err := DecodeReport(subject, content, body, arrived)
			if err != nil {
				t.Fatalf("%s: %v", content, err)
			}
			if len(got.Usage) == 0 {
				got.Usage = nil
			}
			if !reflect.DeepEqual(got, r) {
				t.Fatalf("%s:\n%+v, want\n%+v", content, got, r)
			}
		}
	})
}

// refusal decodes what must be refused, and returns why.
func refusal(t *testing.T, subject, content string, body []byte) *Refusal {
	t.Helper()
	r, err := DecodeReport(subject, content, body, arrived)
	var why *Refusal
	if !errors.As(err, &why) {
		t.Fatalf("DecodeReport = %+v, %v, want a refusal", r, err)
	}
	if s := err.Error(); strings.ContainsAny(s, "\r\n") || len(s) > 1000 {
		t.Errorf("refusal is %q, want one line", s)
	}
	return why
}

// Each bad input has its reason, and names the field.
func TestBadReports(t *testing.T) {
	entry := func(s string) string {
		return `{"boot":"b","seq":1,"usage":[{"ts":"2026-11-29T10:00:00Z","tenant":"a","route":"r","allowed":1},` + s + `]}`
	}
	good := `"ts":"2026-11-29T10:00:00Z","tenant":"a","route":"r"`
	token := func(s string) string { // what s says instead of the rest
		rest := ""
		for _, field := range []string{`"rate_nanos":1`, `"capacity":1`, `"cum":1`, `"window_ns":1`} {
			if name, _, _ := strings.Cut(field, ":"); !strings.Contains(s, ","+name) {
				rest += "," + field
			}
		}
		return `{"boot":"b","seq":1,"tokens":[{"key":"k","limit_rate_nanos":1,"limit_burst":1,"tokens_min":0,"tokens_last":0` + rest + s + `}]}`
	}
	long := strings.Repeat("x", MaxTextBytes+1)
	for _, c := range []struct{ name, subject, content, body, reason, field string }{
		{"not a report", subject, ContentProtobuf, "GET / HTTP/1.1\r\n\r\n", ReasonMalformed, ""},
		{"empty", subject, "", "", ReasonInvalid, "boot"},
		{"JSON cut off", subject, ContentJSON, smallest[:80], ReasonMalformed, ""},
		{"JSON twice", subject, ContentJSON, smallest + smallest, ReasonMalformed, ""},
		{"JSON array", subject, ContentJSON, `[1]`, ReasonMalformed, ""},
		{"JSON null", subject, ContentJSON, `null`, ReasonInvalid, "boot"},
		{"a key twice", subject, ContentJSON, `{"boot":"b","seq":1,"seq":2}`, ReasonMalformed, ""},
		{"a key in two spellings", subject, ContentJSON, `{"boot":"b","seq":1,"BOOT":"c"}`, ReasonMalformed, ""},
		{"a key twice within", subject, ContentJSON, entry(`{` + good + `,"allowed":5,"allowed":6}`), ReasonMalformed, ""},
		{"a key twice behind an object", subject, ContentJSON, `{"boot":"b","usage":[{` + good + `}],"seq":1,"usage":[]}`, ReasonMalformed, ""},
		{"unknown field", subject, ContentJSON, `{"boot":"b","seq":1,"burts":5}`, ReasonMalformed, ""},
		{"unknown field within", subject, ContentJSON, entry(`{` + good + `,"allow":5}`), ReasonMalformed, ""},
		{"content type", subject, "text/plain", smallest, ReasonMalformed, "Content-Type"},
		{"JSON that is not UTF-8", subject, ContentJSON, entry("{\"ts\":\"2026-11-29T10:00:00Z\",\"tenant\":\"\xff\",\"route\":\"r\"}"), ReasonMalformed, ""},
		{"2 MiB", subject, ContentJSON, smallest + strings.Repeat(" ", 2<<20), ReasonSize, ""},
		{"another gateway", subject, ContentJSON, `{"gateway":"gw-2","boot":"b","seq":1}`, ReasonGateway, "gateway"},
		{"subject with a wildcard", UsagePrefix + "*", ContentJSON, smallest, ReasonSubject, ""},
		{"subject with a tail wildcard", UsagePrefix + ">", ContentJSON, smallest, ReasonSubject, ""},
		{"subject with a space", UsagePrefix + "gw 1", ContentJSON, smallest, ReasonSubject, ""},
		{"subject with two tokens", UsagePrefix + "gw.1", ContentJSON, smallest, ReasonSubject, ""},
		{"subject without a token", UsagePrefix, ContentJSON, smallest, ReasonSubject, ""},
		{"subject with a new line", UsagePrefix + "a\r\nPUB x 0\r\n", ContentJSON, smallest, ReasonSubject, ""},
		{"subject that is too long", UsagePrefix + long, ContentJSON, smallest, ReasonSubject, ""},
		{"subject of somebody else", "weir.usage.v2.gw", ContentJSON, smallest, ReasonSubject, ""},
		{"boot missing", subject, ContentJSON, `{"seq":1}`, ReasonInvalid, "boot"},
		{"boot with a dot", subject, ContentJSON, `{"boot":"a.b","seq":1}`, ReasonInvalid, "boot"},
		{"seq missing", subject, ContentJSON, `{"boot":"b"}`, ReasonInvalid, "seq"},
		{"seq beyond all that were sealed", subject, ContentJSON, `{"boot":"b","seq":9007199254740992}`, ReasonInvalid, "seq"},
		{"seq negative", subject, ContentJSON, `{"boot":"b","seq":-1}`, ReasonMalformed, ""},
		{"tenant too long", subject, ContentJSON, entry(`{"ts":"2026-11-29T10:00:00Z","tenant":"` + long + `","route":"r"}`), ReasonInvalid, "usage[1].tenant"},
		{"rejected by nobody", subject, ContentJSON, entry(`{` + good + `,"rejected":1}`), ReasonInvalid, "usage[1].rule"},
		{"cost of no request", subject, ContentJSON, entry(`{` + good + `,"cost":500}`), ReasonInvalid, "usage[1].cost"},
		{"cost of no request, with a rule", subject, ContentJSON, entry(`{` + good + `,"rule":"r","allowed":0,"rejected":0,"cost":1}`), ReasonInvalid, "usage[1].cost"},
		{"ts missing", subject, ContentJSON, entry(`{"tenant":"a","route":"r"}`), ReasonTime, "usage[1].ts"},
		{"ts not a time", subject, ContentJSON, entry(`{"ts":"yesterday","tenant":"a","route":"r"}`), ReasonMalformed, ""},
		{"ts a number", subject, ContentJSON, entry(`{"ts":1751329800,"tenant":"a","route":"r"}`), ReasonMalformed, ""},
		{"bucket without a rule", subject, ContentJSON, token(``), ReasonInvalid, "tokens[0].rule"},
		{"bucket's mode", subject, ContentJSON, token(`,"rule":"r","mode":"maybe"`), ReasonInvalid, "tokens[0].mode"},
		{"bucket's rate", subject, ContentJSON, token(`,"rule":"r","rate_nanos":-2`), ReasonInvalid, "tokens[0].rate_nanos"},
		{"bucket's capacity", subject, ContentJSON, token(`,"rule":"r","capacity":-1`), ReasonInvalid, "tokens[0].capacity"},
		{"bucket's window", subject, ContentJSON, token(`,"rule":"r","window_ns":-1`), ReasonInvalid, "tokens[0].window_ns"},
		{"bucket's cum", subject, ContentJSON, token(`,"rule":"r","cum":9007199254740992`), ReasonInvalid, "tokens[0].cum"},
		{"rejection's path", subject, ContentJSON, `{"boot":"b","seq":1,"rejections":[{` + good + `,"rule":"r","path":"` + long + `"}]}`, ReasonInvalid, "rejections[0].path"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if why := refusal(t, c.subject, c.content, []byte(c.body)); why.Reason != c.reason || why.Field != c.field {
				t.Errorf("refused with %q for %q (%s), want %q for %q", why.Reason, why.Field, why.Detail, c.reason, c.field)
			}
		})
	}
}

// A text with control characters would do things to whatever shows it. No gateway sends one: it answers 400 to such a request.
func TestTextsWithControlCharacters(t *testing.T) {
	set := map[string]func(r *Report, s string){
		"usage[0].tenant":        func(r *Report, s string) { r.Usage[0].Tenant = s },
		"usage[0].route":         func(r *Report, s string) { r.Usage[0].Route = s },
		"usage[0].rule":          func(r *Report, s string) { r.Usage[0].Rule = s },
		"usage[0].layer":         func(r *Report, s string) { r.Usage[0].Layer = s },
		"tokens[0].rule":         func(r *Report, s string) { r.Tokens[0].Rule = s },
		"tokens[0].key":          func(r *Report, s string) { r.Tokens[0].Key = s },
		"tokens[0].tenant":       func(r *Report, s string) { r.Tokens[0].Tenant = s },
		"tokens[0].layer":        func(r *Report, s string) { r.Tokens[0].Layer = s },
		"rejections[0].tenant":   func(r *Report, s string) { r.Rejections[0].Tenant = s },
		"rejections[0].route":    func(r *Report, s string) { r.Rejections[0].Route = s },
		"rejections[0].rule":     func(r *Report, s string) { r.Rejections[0].Rule = s },
		"rejections[0].layer":    func(r *Report, s string) { r.Rejections[0].Layer = s },
		"rejections[0].method":   func(r *Report, s string) { r.Rejections[0].Method = s },
		"rejections[0].path":     func(r *Report, s string) { r.Rejections[0].Path = s },
		"rejections[0].client":   func(r *Report, s string) { r.Rejections[0].Client = s },
		"rejections[0].instance": func(r *Report, s string) { r.Rejections[0].Instance = s },
	}
	check := func(field, s string, refused bool) {
		t.Helper()
		r := &Report{Boot: "b", Seq: 1, Usage: []Usage{{Time: arrived, Tenant: "a", Route: "r", Rule: "x", Rejected: 1}},
			Tokens: []Tokens{{Rule: "x", Key: "k"}}, Rejections: []Rejection{{Time: arrived, Tenant: "a", Route: "r", Rule: "x"}}}
		set[field](r, s)
		err := r.Validate(arrived)
		why, ok := errors.AsType[*Refusal](err)
		if refused != (ok && why.Reason == ReasonInvalid && why.Field == field) || !refused && err != nil {
			t.Errorf("%s = %q: %v, want refused %t", field, s, err, refused)
		}
	}
	for field := range set {
		for _, s := range []string{"a\nb", "\x1b[2J", "a\x00", "\x7f", "\u009b31m", "a\tb"} {
			check(field, s, true)
		}
		check(field, "Ünï 株 100 %|#", false)
	}
	for key, refused := range map[string]bool{"a%0Ab": true, "a%1b": true, "%C2%9B": true, "%FF": true, "a%7Cb%25|%23c": false, "50%": false, "%zz%C3%A9": false} {
		check("tokens[0].key", key, refused)
	}
}

// B007: a negative quantity would give back what was used. Malformed numbers are never read as 0 or 1.
func TestB007NegativeAndMalformedCounts(t *testing.T) {
	for _, n := range []string{"-5", "-9223372036854775808", "-1", "1.5", `"5"`, `""`, `" 1"`, `"1e3"`, `"0x10"`, "1e3", "18446744073709551616", "99999999999999999999999", "9007199254740992", "true", "[]"} {
		for _, field := range []string{"allowed", "rejected", "cost"} {
			body := fmt.Sprintf(`{"boot":"b","seq":1,"usage":[{"ts":"2026-11-29T10:00:00Z","tenant":"a","route":"r","rule":"x",%q:%s}]}`, field, n)
			why := refusal(t, subject, ContentJSON, []byte(body))
			if why.Reason != ReasonMalformed && why.Reason != ReasonInvalid {
				t.Errorf("%s %s is refused as %s", field, n, why.Reason)
			}
		}
	}
	for _, n := range []uint64{1 << 63, math.MaxUint64, MaxReportRequests + 1} { // -5 and the like, seen by a varint
		pb, err := proto.Marshal(&weirpb.Report{Boot: "b", Seq: 1, Usage: []*weirpb.Usage{{TsNs: arrived.UnixNano(), Tenant: "a", Route: "r", Allowed: n}}})
		if err != nil {
			t.Fatal(err)
		}
		if why := refusal(t, subject, ContentProtobuf, pb); why.Reason != ReasonInvalid || why.Field != "usage[0].allowed" {
			t.Errorf("allowed %d is refused as %v", n, why)
		}
	}
}

// A report cannot make a sum wrap: neither its own, nor, within any time, one of many reports. What is in its entries together is bounded.
func TestUsageOfAReportIsBoundedInSum(t *testing.T) {
	entries := func(n int, u Usage) []byte {
		u.Time, u.Tenant, u.Route = arrived, "a", "r"
		body, err := EncodeReport(&Report{Boot: "b", Seq: 1, Usage: slices.Repeat([]Usage{u}, n)})
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	for name, c := range map[string]struct {
		n             int
		u             Usage
		field, detail string
	}{
		"2^64 in all, which each entry may be a part of": {2049, Usage{Allowed: math.MaxInt64 >> 10}, "usage[0].allowed", "is 9007199254740991, want at most 10000000000"},
		"the largest entries":                            {20_000, Usage{Allowed: MaxReportRequests}, "usage[1]", "brings the requests of the report to 20000000000, want at most 10000000000 in one"},
		"one entry of both outcomes":                     {1, Usage{Rule: "x", Allowed: MaxReportRequests, Rejected: 1}, "usage[0]", "brings the requests of the report to 10000000001, want at most 10000000000 in one"},
		"one too many":                                   {101, Usage{Rule: "x", Rejected: MaxReportRequests/100 - 1, Cost: 1}, "usage[100]", "brings the requests of the report to 10099999899, want at most 10000000000 in one"},
		"cost":                                           {3, Usage{Allowed: 1, Cost: MaxReportCost / 2}, "usage[2].cost", "brings the cost of the report to 150000000000, want at most 100000000000 in one"},
		"requests that cost one each, for it is not said": {11, Usage{Allowed: MaxReportRequests / 10}, "usage[10]", "brings the requests of the report to 11000000000, want at most 10000000000 in one"},
	} {
		if why := refusal(t, subject, ContentProtobuf, entries(c.n, c.u)); why.Reason != ReasonInvalid || why.Field != c.field || why.Detail != c.detail {
			t.Errorf("%s is refused as %v", name, why)
		}
	}
	for name, body := range map[string][]byte{
		"requests": entries(100, Usage{Allowed: MaxReportRequests / 100}),
		"cost":     entries(100, Usage{Allowed: 1, Cost: MaxReportCost / 100}),
	} {
		if _, err := DecodeReport(subject, ContentProtobuf, body, arrived); err != nil {
			t.Errorf("as much as there may be of %s: %v", name, err)
		}
	}
	// Half of the bounds' reports of ten thousand a second take longer than anybody looks away.
	if reports := uint64(math.MaxInt64) / MaxReportRequests; reports < 24*3600*10_000 {
		t.Errorf("%d reports make a sum of requests negative", reports)
	}
	if reports := uint64(math.MaxInt64) / MaxReportCost; reports < 2*3600*10_000 {
		t.Errorf("%d reports make a sum of costs negative", reports)
	}
}

// B037: a time that a 32-bit column would wrap, or that is of another unit, must not become a plausible date.
func TestB037ImplausibleTimes(t *testing.T) {
	now := arrived
	for _, c := range []struct {
		name string
		at   time.Time
		ok   bool
	}{
		{"2201", time.Date(2201, 4, 15, 19, 58, 20, 0, time.UTC), false},
		{"1900", time.Date(1900, 1, 1, 0, 0, 0, 0, time.UTC), false},
		{"end of 32 bits", time.Date(2106, 2, 7, 6, 28, 16, 0, time.UTC), false},
		{"year 2300", time.Date(2300, 1, 1, 0, 0, 0, 0, time.UTC), false},
		{"milliseconds where nanoseconds belong", time.Unix(0, 1751329800129), false},
		{"seconds where nanoseconds belong", time.Unix(0, 1751329800), false},
		{"milliseconds where seconds belong", time.Unix(1751329800129, 0), false},
		{"25 hours ahead", now.Add(25 * time.Hour), false},
		{"400 days ago", now.Add(-400 * 24 * time.Hour), false},
		{"24 hours ahead", now.Add(MaxAhead), true},
		{"366 days ago", now.Add(-MaxBehind), true},
		{"now", now, true},
	} {
		u := Usage{Time: c.at, Tenant: "a", Route: "r", Allowed: 1}
		j := Rejection{Time: c.at, Rule: "r"}
		for _, r := range []*Report{{Boot: "b", Seq: 1, Usage: []Usage{u}}, {Boot: "b", Seq: 1, Rejections: []Rejection{j}}} {
			var bodies [][]byte
			if c.at.Year() < 2262 && c.at.Year() > 1677 { // what fits into nanoseconds
				pb, err := EncodeReport(r)
				if err != nil {
					t.Fatal(err)
				}
				bodies = append(bodies, pb)
			}
			if c.at.Year() < 10000 {
				js, err := json.Marshal(r)
				if err != nil {
					t.Fatal(err)
				}
				bodies = append(bodies, js)
			}
			for _, body := range bodies {
				if c.ok {
					if _, err := DecodeReport(subject, "", body, now); err != nil {
						t.Errorf("%s: %v", c.name, err)
					}
					continue
				}
				if why := refusal(t, subject, "", body); why.Reason != ReasonTime || !strings.HasSuffix(why.Field, ".ts") {
					t.Errorf("%s is refused as %v", c.name, why)
				}
			}
		}
	}
	zero := []byte(`{"boot":"b","seq":1,"usage":[{"ts":"0001-01-01T00:00:00Z","tenant":"a","route":"r"}]}`)
	if why := refusal(t, subject, ContentJSON, zero); why.Reason != ReasonTime {
		t.Errorf("Go's zero time is refused as %v", why)
	}
}

// Text that is no UTF-8 cannot be encoded, and is refused when somebody else has.
func TestProtobufTextThatIsNotUTF8(t *testing.T) {
	if _, err := EncodeReport(&Report{Boot: "b", Seq: 1, Usage: []Usage{{Time: arrived, Tenant: "\xff"}}}); err == nil {
		t.Error("EncodeReport = nil, want an error")
	}
	usage := protowire.AppendTag(nil, 2, protowire.BytesType)
	usage = protowire.AppendBytes(usage, []byte{0xff, 0xfe})
	body := protowire.AppendTag(nil, 5, protowire.BytesType)
	body = protowire.AppendBytes(body, usage)
	if why := refusal(t, subject, ContentProtobuf, body); why.Reason != ReasonMalformed {
		t.Errorf("refused as %v", why)
	}
}

// B020: nothing that a caller chose is a token of a subject, and two names never make one.
func TestB020NamesThatCannotStandInASubject(t *testing.T) {
	for _, name := range []string{"a b", "a\tb", "a\r\nPUB x 0\r\n", "a.b", "*", ">", "$JS.API.>", "..", "", "ключ", "a\x00b", strings.Repeat("k", 5000)} {
		if err := ValidName(name); err == nil || strings.ContainsAny(err.Error(), "\r\n\x00") || len(err.Error()) > 300 {
			t.Errorf("ValidName(%.20q) = %v, want one short line", name, err)
		}
	}
	for _, name := range []string{"a", "gw-1", "GW_1", strings.Repeat("k", 64)} {
		if err := ValidName(name); err != nil {
			t.Errorf("ValidName(%q) = %v", name, err)
		}
	}
}

func TestThrottleUpdatesThatNoCentreSends(t *testing.T) {
	for name, u := range map[string]*ThrottleUpdate{
		"no time to live":    {Gateways: 1},
		"no gateways":        {TTL: time.Second},
		"a negative share":   {Gateways: 1, TTL: time.Second, Shares: []Share{{RateNanos: -1}}},
		"a weight above all": {Gateways: 1, TTL: time.Second, Weight: 1_000_001},
		"a negative burst":   {Gateways: 1, TTL: time.Second, Shares: []Share{{Burst: -1}}},
	} {
		b, err := EncodeThrottleUpdate(u)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := DecodeThrottleUpdate(b); err == nil {
			t.Errorf("%s = %+v, want an error", name, got)
		}
	}
	if _, err := DecodeThrottleUpdate([]byte{0xff}); err == nil {
		t.Error("garbage = nil, want an error")
	}
}

// Whatever the bytes are, the answer is a report in its bounds or a refusal with one of the reasons.
func FuzzDecodeReport(f *testing.F) {
	for _, name := range []string{"report.pb", "report.json"} {
		body, err := os.ReadFile(filepath.Join("testdata", "v1", name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(subject, "", body)
		f.Add(subject, ContentProtobuf, body)
		f.Add(subject, ContentJSON, body[:len(body)/2])
	}
	f.Add(UsagePrefix+"*", "text/plain", []byte(smallest))
	f.Add(subject, ContentJSON, []byte(`{"boot":"b","seq":1,"usage":[{"ts":"2026-11-29T10:00:00Z","tenant":"a","route":"r","rule":"r","allowed":9007199254740991,"rejected":9007199254740991,"cost":9007199254740991}]}`))
	known := map[string]bool{ReasonMalformed: true, ReasonInvalid: true, ReasonTime: true, ReasonSize: true, ReasonGateway: true, ReasonSubject: true}
	f.Fuzz(func(t *testing.T, subject, content string, body []byte) {
		r, err := DecodeReport(subject, content, body, arrived)
		if err != nil {
			var why *Refusal
			if !errors.As(err, &why) || !known[why.Reason] || r != nil {
				t.Fatalf("DecodeReport = %v, %v, want a refusal with a known reason", r, err)
			}
			return
		}
		if err := r.Validate(arrived); err != nil {
			t.Fatalf("decoded and not valid: %v", err)
		}
		if subject != UsagePrefix+r.Gateway {
			t.Fatalf("gateway %q came on %q", r.Gateway, subject)
		}
		again, err := EncodeReport(r)
		if err != nil {
			t.Fatalf("decoded and not encoded: %v", err)
		}
		got, err := DecodeReport(subject, ContentProtobuf, again, arrived)
		var size *Refusal
		if errors.As(err, &size) && size.Reason == ReasonSize { // entries with two outcomes are two now
			return
		}
		if err != nil {
			t.Fatalf("decoded, encoded and refused: %v", err)
		}
		if got.Requests() != r.Requests() || len(got.Usage) != len(r.Usage) || len(got.Tokens) != len(r.Tokens) || len(got.Rejections) != len(r.Rejections) {
			t.Fatalf("decoded twice: %+v, then %+v", r, got)
		}
	})
}
