package app

import (
	"encoding/json"
	"log/slog"
	"net/http"

	"github.com/weirhq/weir/internal/run"
)

// Echo serves a stand-in for an API on a free port: it answers every request with what was asked. It returns its URL.
func Echo(stack *run.Stack, log *slog.Logger) (string, error) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]string{"method": r.Method, "path": r.URL.RequestURI(), "from": r.Header.Get("X-Forwarded-For")})
	})
	addr, err := listen("echo service", "127.0.0.1:0", h, stack, log)
	if err != nil {
		return "", err
	}
	return "http://" + addr, nil
}
