package replay

import (
	"net/http"
	"testing"

	"github.com/weirhq/weir/aggregator/clickhouse"
	"github.com/weirhq/weir/internal/accesslog"
	"github.com/weirhq/weir/limits"
)

// TestJudgeFindsWhatIsLostAndWhatIsDoubled has a sum that is right by accident: one lost, one doubled.
func TestJudgeFindsWhatIsLostAndWhatIsDoubled(t *testing.T) {
	at := func(gateway, rule string) clickhouse.Outcome { return clickhouse.Outcome{Gateway: gateway, Rule: rule} }
	r := &replay{res: &Result{Requests: 10}, sent: map[clickhouse.Outcome]uint64{at("a", ""): 6, at("a", "contract"): 3, at("b", ""): 1}}
	for _, tt := range []struct {
		stored        map[clickhouse.Outcome]uint64
		lost, doubled int
		whole         bool
	}{
		{map[clickhouse.Outcome]uint64{at("a", ""): 6, at("a", "contract"): 3, at("b", ""): 1}, 0, 0, true},
		{map[clickhouse.Outcome]uint64{at("a", ""): 6, at("a", "contract"): 4}, 1, 1, false},
		{map[clickhouse.Outcome]uint64{at("a", ""): 6}, 4, 0, false},
		{nil, 10, 0, false},
		{map[clickhouse.Outcome]uint64{at("a", ""): 12, at("a", "contract"): 3, at("b", ""): 1}, 0, 6, false},
	} {
		r.judge(tt.stored)
		if r.res.Lost != tt.lost || r.res.Doubled != tt.doubled || r.res.Whole() != tt.whole {
			t.Errorf("judge(%v): lost %d, doubled %d, whole %v, want %d, %d, %v", tt.stored, r.res.Lost, r.res.Doubled, r.res.Whole(), tt.lost, tt.doubled, tt.whole)
		}
	}
}

func TestRefusedByIsTheFirstRuleOfTheField(t *testing.T) {
	for field, want := range map[string]string{`"contract";r=0;t=1`: "contract", `"a";r=0, "b";r=1`: "a", "": "", "contract": ""} {
		if got := refusedBy(http.Header{"Ratelimit": {field}}); got != want {
			t.Errorf("refusedBy(%q) = %q, want %q", field, got, want)
		}
	}
}

// TestRequestsAreThoseOfTheLog has an IPv6 client, a user and a tenant.
func TestRequestsAreThoseOfTheLog(t *testing.T) {
	p, err := limits.Parse("policy.yaml", []byte("version: 1\nidentity: {tenant: {header: X-App-Key}}\nrules: [{name: guard, layer: guard, key: [], rate: 1/s, burst: 1}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	r := request(p, &accesslog.Entry{Client: "2001:db8::1", Method: http.MethodGet, URI: "/x?y=1", Tenant: "acme", User: "u", Device: "d"})
	user, _, _ := r.BasicAuth()
	if r.RemoteAddr != "[2001:db8::1]:1" || r.RequestURI != "/x?y=1" || r.Header.Get("X-App-Key") != "acme" || user != "u" || r.Header.Get("X-Device-Id") != "d" {
		t.Errorf("request = %q %q %v, want the log's client, target, tenant, user and device", r.RemoteAddr, r.RequestURI, r.Header)
	}
}
