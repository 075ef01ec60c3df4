package load

import (
	"context"
	"math"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// TestEveryAnswerIsInTheSummary compares the summary with what a server counted itself.
func TestEveryAnswerIsInTheSummary(t *testing.T) {
	var mu sync.Mutex
	served := map[string]int{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		tenant := r.Header.Get("X-App-Key")
		served[tenant]++
		if tenant == "acme" {
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = w.Write([]byte(`{"violated-policies":["contract"]}`))
		}
	}))
	defer srv.Close()
	g, err := New(Config{URLs: []string{srv.URL}, Rate: 2000, MadAfter: time.Millisecond, MadFor: time.Hour, MadRate: 500})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := g.Run(ctx); err != nil {
		t.Fatal(err)
	}
	s := g.Take()
	total := 0
	for tenant, n := range served {
		total += n
		if s.Tenants[tenant] != n {
			t.Errorf("summary says %d requests of %s, the server saw %d", s.Tenants[tenant], tenant, n)
		}
	}
	if s.Requests != total || total == 0 {
		t.Errorf("summary says %d requests, the server saw %d, want the same and some", s.Requests, total)
	}
	if s.Refused["contract"] != served["acme"] || served["acme"] == 0 {
		t.Errorf("summary says %d refused by contract, the server refused %d, want the same and some", s.Refused["contract"], served["acme"])
	}
	if s.Allowed != total-served["acme"] {
		t.Errorf("summary says %d allowed, want %d", s.Allowed, total-served["acme"])
	}
}

func TestPoissonHasItsMean(t *testing.T) {
	g, err := New(Config{URLs: []string{"http://127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, mean := range []float64{0.1, 3, 100} {
		sum := 0
		const n = 20_000
		for range n {
			sum += g.poisson(mean)
		}
		if got, slack := float64(sum)/n, 5*math.Sqrt(mean/n); math.Abs(got-mean) > slack {
			t.Errorf("mean of poisson(%v) = %v, want within %v", mean, got, slack)
		}
	}
}

func TestNewReportsEveryMistake(t *testing.T) {
	_, err := New(Config{Skew: 0.5, Rate: -1, Tenants: -2})
	want := "load: no gateway to send to; skew must be above 1; rate must be above 0; tenants must be above 0"
	if err == nil || err.Error() != want {
		t.Errorf("New = %v, want %s", err, want)
	}
}
