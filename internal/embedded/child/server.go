package child

import (
	"fmt"
	"log/slog"
	"sync"
	"syscall"
	"time"
)

// Config says how a Server is run. Name is required; another zero field means its default.
type Config struct {
	Name      string        // for errors and the log, such as "embedded Redis"
	Grace     time.Duration // that Stop gives it to end (10s)
	Supervise bool          // one that dies by itself is started again; Kill and Stop end it all the same
}

// again is how long a Server waits before it starts a child that has died: the first time, the second, and from then on. A child
// that has lived for steady counts as the first one again.
var again = []time.Duration{time.Second, 2 * time.Second, 5 * time.Second}

const steady = time.Minute

// Server is a child that serves on one address and keeps its data there: it can be stopped, killed, frozen and started again.
// Its methods may be called from any goroutine.
type Server struct {
	cfg   Config
	log   *slog.Logger
	start func() (*Process, error)

	mu      sync.Mutex // all below, held while the child starts or ends
	process *Process   // nil while it is down on purpose
	since   time.Time  // when process started
	quit    chan struct{}
	watched chan struct{} // closed when nobody watches any more
}

// Serve calls start, which runs the child and returns once it answers, on the same address each time.
func Serve(cfg Config, start func() (*Process, error), log *slog.Logger) (*Server, error) {
	if cfg.Grace == 0 {
		cfg.Grace = 10 * time.Second
	}
	s := &Server{cfg: cfg, log: log, start: start}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.run(); err != nil {
		return nil, err
	}
	return s, nil
}

// run starts the child and watches it. mu is held.
func (s *Server) run() error {
	p, err := s.start()
	if err != nil {
		return err
	}
	s.process, s.since = p, time.Now()
	if s.cfg.Supervise {
		s.quit, s.watched = make(chan struct{}), make(chan struct{})
		go s.watch(p, s.quit, s.watched)
	}
	return nil
}

// watch starts the child again when it dies by itself, until quit is closed.
func (s *Server) watch(p *Process, quit <-chan struct{}, watched chan<- struct{}) {
	defer close(watched)
	for tries := 0; ; {
		select {
		case <-quit:
			return
		case <-p.Done():
		}
		s.mu.Lock()
		if s.process != p { // ended on purpose
			s.mu.Unlock()
			return
		}
		lived := time.Since(s.since)
		s.mu.Unlock()
		if lived >= steady {
			tries = 0
		}
		for cause := p.Failure(); ; tries++ {
			wait := again[min(tries, len(again)-1)]
			s.log.Error(s.cfg.Name+" is down, starting it again", "in", wait, "lived", lived.Round(time.Millisecond), "err", cause)
			select {
			case <-quit:
				return
			case <-time.After(wait):
			}
			next, err := s.replace(p)
			if next == nil && err == nil {
				return
			}
			if err == nil {
				s.log.Info(s.cfg.Name+" is back", "pid", next.PID())
				p = next
				tries++
				break
			}
			cause = err
		}
	}
}

// replace starts a child for p, which has died. It returns nil if p has been ended on purpose since.
func (s *Server) replace(p *Process) (*Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process != p {
		return nil, nil
	}
	next, err := s.start()
	if err != nil {
		return nil, err
	}
	s.process, s.since = next, time.Now()
	return next, nil
}

// PID is the child's process id, 0 while there is none.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return 0
	}
	return s.process.PID()
}

// Stop asks the server to end what it is doing, and ends it. It may be called twice.
func (s *Server) Stop() error {
	return s.end(func(p *Process) error { return p.Stop(s.cfg.Grace) })
}

// Kill ends the server as a crash would (SIGKILL). What was acknowledged is there after a Restart.
func (s *Server) Kill() error { return s.end((*Process).Kill) }

func (s *Server) end(how func(*Process) error) error {
	s.mu.Lock()
	p, quit, watched := s.process, s.quit, s.watched
	s.process, s.quit, s.watched = nil, nil, nil
	if quit != nil {
		close(quit)
	}
	var err error
	if p != nil {
		err = how(p)
	}
	s.mu.Unlock()
	if watched != nil {
		<-watched
	}
	if err != nil {
		return fmt.Errorf("end %s: %w", s.cfg.Name, err)
	}
	return nil
}

// Pause freezes the server (SIGSTOP): connections stay open and nothing is answered until Resume.
func (s *Server) Pause() error { return s.signal(syscall.SIGSTOP) }

// Resume ends a Pause.
func (s *Server) Resume() error { return s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.process == nil {
		return fmt.Errorf("%s is not running", s.cfg.Name)
	}
	return s.process.Signal(sig)
}

// Restart runs the server again on the same address and data, after Kill or Stop or instead of them.
func (s *Server) Restart() error {
	if err := s.Stop(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.run()
}
