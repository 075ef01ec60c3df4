package redis

import (
	"fmt"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// mini is miniredis as a server, in this process.
type mini struct {
	addr, password string

	mu      sync.Mutex // guards what follows
	server  *miniredis.Miniredis
	ticking chan struct{} // closed to stop the server's clock
}

func startMini(addr, password string) (*mini, error) {
	s := &mini{addr: addr, password: password}
	if err := s.start(); err != nil {
		return nil, err
	}
	return s, nil
}

// start runs the server. mu is held, or s not yet shared.
func (s *mini) start() error {
	m := miniredis.NewMiniRedis()
	if s.password != "" {
		m.RequireAuth(s.password)
	}
	if err := m.StartAddr(s.addr); err != nil {
		return fmt.Errorf("embedded Redis on %s: %w", s.addr, err)
	}
	s.server, s.ticking = m, make(chan struct{})
	go func(done <-chan struct{}) { // miniredis expires keys only when it is told that time has passed
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for last := time.Now(); ; {
			select {
			case now := <-tick.C:
				m.FastForward(now.Sub(last))
				last = now
			case <-done:
				return
			}
		}
	}(s.ticking)
	return nil
}

func (s *mini) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.server != nil {
		close(s.ticking)
		s.server.Close()
		s.server = nil
	}
	return nil
}

func (s *mini) Kill() error { return s.Stop() }

func (s *mini) Pause() error { return ErrNotReal }

func (s *mini) Resume() error { return ErrNotReal }

func (s *mini) Restart() error {
	if err := s.Stop(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.start()
}
