package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/weirhq/weir/cmd/internal/app"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/obs"
)

// setting is one of CONTRACT's settings: a flag, and the environment variable that stands in for it.
type setting struct {
	flag, env, text string
	value           string // the default
}

var settings = map[string]setting{
	"nats":         {"nats", "WEIR_NATS_URL", "NATS server", ""},
	"redis":        {"redis", "WEIR_REDIS_URL", "Redis server", ""},
	"clickhouse":   {"clickhouse", "WEIR_CLICKHOUSE_URL", "ClickHouse server, native or HTTP", ""},
	"policy":       {"policy", "WEIR_POLICY", "policy file or folder", ""},
	"data":         {"data", "WEIR_DATA", "folder for state on disk", "./weir-data"},
	"upstream":     {"upstream", "WEIR_UPSTREAM", "API that the gateway stands in front of", ""},
	"webhook":      {"webhook", "WEIR_WEBHOOK_URL", "on-call webhook; its secret is read from WEIR_WEBHOOK_SECRET or WEIR_WEBHOOK_SECRET_FILE", ""},
	"gateway-addr": {"gateway-addr", "WEIR_GATEWAY_ADDR", "listener of the gateway", "127.0.0.1:8080"},
	"check-addr":   {"check-addr", "WEIR_CHECK_ADDR", "listener of the check API", "127.0.0.1:8081"},
	"metrics-addr": {"metrics-addr", "WEIR_METRICS_ADDR", "listener of /livez, /readyz and /metrics", "127.0.0.1:9090"},
	"spool-max":    {"spool-max", "WEIR_SPOOL_MAX", "bytes of usage reports that a gateway keeps on disk until the history has them; the last ones may go over it, and up to 256 MiB of counts are beside it", "1GiB"},
	"log-level":    {"log-level", "WEIR_LOG_LEVEL", "debug, info, warn or error", "info"},
}

// bind adds the named settings to cmd, with their environment variables.
func bind(cmd *cobra.Command, into map[string]*string) {
	for name, p := range into {
		s := settings[name]
		value := s.value
		if v, ok := os.LookupEnv(s.env); ok {
			value = v
		}
		cmd.Flags().StringVar(p, s.flag, value, fmt.Sprintf("%s ($%s)", s.text, s.env))
	}
}

// parseSize reads a number of bytes such as 512MiB; without a unit it is bytes.
func parseSize(flag, s string) (int64, error) {
	digits := strings.TrimRight(s, "KMGTiB")
	units := map[string]int64{"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
	unit, ok := units[s[len(digits):]]
	n, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || n <= 0 || n > math.MaxInt64/unit {
		return 0, usagef("%s %s, want a size such as 1GiB or 512MiB", flag, s)
	}
	return n * unit, nil
}

// servers holds the addresses of the three servers.
type servers struct {
	nats, redis, clickhouse, data string
	embedded                      bool // nats is the server of a running `weir up`; known once resolved
}

func (s *servers) bind(cmd *cobra.Command) {
	bind(cmd, map[string]*string{"nats": &s.nats, "redis": &s.redis, "clickhouse": &s.clickhouse, "data": &s.data})
}

// resolve fills in what was not said: the endpoints of a running `weir up` in the data folder, else the default ports.
func (s *servers) resolve() error {
	if err := s.validate(); err != nil {
		return err
	}
	var e app.Endpoints
	b, err := os.ReadFile(filepath.Join(s.data, app.EndpointsFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return fmt.Errorf("read endpoints: %w", err)
	default:
		if err := json.Unmarshal(b, &e); err != nil {
			return fmt.Errorf("read %s: %w", filepath.Join(s.data, app.EndpointsFile), err)
		}
	}
	first := func(p *string, rest ...string) {
		for _, v := range rest {
			if *p == "" {
				*p = v
			}
		}
	}
	first(&s.nats, e.NATS, "nats://127.0.0.1:4222")
	first(&s.redis, e.Redis, "redis://127.0.0.1:6379")
	first(&s.clickhouse, e.ClickHouse, "clickhouse://127.0.0.1:9000/weir")
	s.embedded = e.NATS != "" && s.nats == e.NATS
	return nil
}

// validate refuses an address that no client could read. Empty ones are not said yet.
func (s *servers) validate() error {
	for _, a := range []struct {
		flag, value, like string
		schemes           []string
	}{
		{"--nats", s.nats, "nats://127.0.0.1:4222", []string{"nats", "tls", "ws", "wss"}},
		{"--redis", s.redis, "redis://127.0.0.1:6379", []string{"redis", "rediss"}},
		{"--clickhouse", s.clickhouse, "clickhouse://127.0.0.1:9000/weir or http://127.0.0.1:8123/weir", []string{"clickhouse", "http", "https"}},
	} {
		each := []string{a.value}
		if a.flag == "--nats" { // several, and the scheme may be left out
			each = strings.Split(a.value, ",")
			for i, v := range each {
				if v = strings.TrimSpace(v); v != "" && !strings.Contains(v, "://") {
					v = "nats://" + v
				}
				each[i] = v
			}
		}
		for _, v := range each {
			u, err := url.Parse(v)
			if a.value != "" && (err != nil || u.Hostname() == "" || !slices.Contains(a.schemes, u.Scheme)) {
				return usagef("%s %s, want an address such as %s", a.flag, shownAddress(v), a.like)
			}
		}
	}
	return nil
}

// shownAddress is an address as it may be shown. One that does not look like an address could be a password altogether.
func shownAddress(v string) string {
	if strings.Contains(v, "@") && !strings.Contains(v, "://") {
		return "(an address that does not parse)"
	}
	return conf.Redact(v)
}

// logger writes to the command's standard error.
func logger(cmd *cobra.Command, level string) (*slog.Logger, error) {
	log, err := obs.Logger(cmd.ErrOrStderr(), level)
	if err != nil {
		return nil, usageError{err}
	}
	return log, nil
}

// output is -o table|json.
type output string

func (o *output) bind(cmd *cobra.Command) {
	cmd.Flags().StringVarP((*string)(o), "output", "o", "table", "table or json")
}

func (o output) validate() error {
	if o != "table" && o != "json" {
		return usagef("-o %q, want table or json", string(o))
	}
	return nil
}

// write prints v as JSON, or calls table with a writer that aligns tab-separated cells.
func (o output) write(w io.Writer, v any, table func(io.Writer)) error {
	if o == "json" {
		enc := json.NewEncoder(w)
		enc.SetEscapeHTML(false)
		return enc.Encode(v)
	}
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	table(tw)
	return tw.Flush()
}
