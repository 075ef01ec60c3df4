package httpguard

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"
)

// Bounds of a connection. Answers have no bound of their own: they may be streams.
const (
	maxHeaderBytes = 64 << 10 // beyond it (and a little slack of net/http) a request is answered 431
	headerTimeout  = 5 * time.Second
	bodyTimeout    = 30 * time.Second // without one byte of a body that was promised
	idleTimeout    = 75 * time.Second // between two requests
)

// Server serves h with every bound set that a listener to the world needs: a head that is too long or too slow, a body that
// has stopped coming and an idle connection all end. Its Shutdown returns when the requests in flight are answered, and so
// counted; stop the reporter after that, not before.
func Server(addr string, h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Addr:              addr,
		Handler:           steadyBody(h, bodyTimeout),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// steadyBody ends requests whose body does not arrive: each read may wait for at most d. A body as a whole may take any time.
func steadyBody(h http.Handler, d time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body == nil || r.Body == http.NoBody {
			h.ServeHTTP(w, r)
			return
		}
		b := &steady{body: r.Body, conn: http.NewResponseController(w), d: d}
		b.extend() // also bounds what net/http reads of a body that h leaves unread
		r = r.WithContext(context.WithValue(r.Context(), steadyKey{}, b))
		r.Body = b
		h.ServeHTTP(w, r)
	})
}

// steadyKey is where a request's context has its steady body.
type steadyKey struct{}

// bodyStopped says whether the body of r did not arrive as it was promised: its sender is at fault, nobody else.
func bodyStopped(r *http.Request) bool {
	b, ok := r.Context().Value(steadyKey{}).(*steady)
	return ok && b.failed.Load()
}

// steady is a body with a deadline for each read.
type steady struct {
	body   io.ReadCloser
	conn   *http.ResponseController
	d      time.Duration
	over   bool        // read to its end
	failed atomic.Bool // some read did
}

func (b *steady) Read(p []byte) (int, error) {
	if !b.over { // or else net/http watches the connection by now, and a deadline would look like the caller's leaving
		b.extend()
	}
	n, err := b.body.Read(p)
	if errors.Is(err, io.EOF) {
		b.over = true
	} else if err != nil {
		b.failed.Store(true)
	}
	return n, err
}

func (b *steady) Close() error { return b.body.Close() }

// extend starts the time for the next read. A connection without deadlines (a test's recorder) has none.
func (b *steady) extend() { _ = b.conn.SetReadDeadline(time.Now().Add(b.d)) }
