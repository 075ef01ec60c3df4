package obs

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

func TestDurationsAreLegible(t *testing.T) {
	var b bytes.Buffer
	log, err := Logger(&b, "info")
	if err != nil {
		t.Fatal(err)
	}
	log.With("every", 90*time.Second).Info("x", "for", time.Second, "n", 1000000000)
	var got map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if got["for"] != "1s" || got["every"] != "1m30s" || got["n"] != 1e9 {
		t.Errorf("logged %s", b.String())
	}
}

func TestReady(t *testing.T) {
	good, bad := func() error { return nil }, func() error { return errors.Join(errors.New("no Redis"), errors.New("no ClickHouse")) }
	for _, c := range []struct {
		checks []Check
		code   int
		body   string
	}{
		{[]Check{{Name: "b", Ready: good}, {Name: "a", Ready: good, Beside: true}}, http.StatusOK, "a: ok\nb: ok\n"},
		{[]Check{{Name: "gateway", Ready: good}, {Name: "aggregator", Ready: bad, Beside: true}}, http.StatusOK, "aggregator: degraded: no Redis; no ClickHouse\ngateway: ok\n"},
		{[]Check{{Name: "gateway", Ready: bad}, {Name: "aggregator", Ready: good, Beside: true}}, http.StatusServiceUnavailable, "aggregator: ok\ngateway: no Redis; no ClickHouse\n"},
	} {
		w := httptest.NewRecorder()
		ready(w, c.checks)
		if w.Code != c.code || w.Body.String() != c.body {
			t.Errorf("ready = %d %q, want %d %q", w.Code, w.Body.String(), c.code, c.body)
		}
	}
}
