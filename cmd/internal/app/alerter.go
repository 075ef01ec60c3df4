package app

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/weirhq/weir/alerting"
	"github.com/weirhq/weir/alerting/natsfeed"
	"github.com/weirhq/weir/alerting/webhook"
	"github.com/weirhq/weir/internal/conf"
	"github.com/weirhq/weir/internal/natsx"
	"github.com/weirhq/weir/internal/run"
	"github.com/weirhq/weir/schemas"
)

// AlerterConfig says whom to wake. Zero fields: nobody, alerts are stored and logged.
type AlerterConfig struct {
	Webhook  conf.Secret     // its address, which may hold a credential
	Secret   conf.Secret     // signs what is sent; several, separated by spaces, while one is being replaced
	Detector alerting.Config // what is too much
}

// Alerter watches usage and heartbeats and wakes on-call.
type Alerter struct{ nc *nats.Conn }

// receiver names the webhook, and its durable consumer.
const receiver = "webhook"

// NewAlerter starts an alerter on the stack. NATS may come later: with a webhook, on-call hears that it is away.
func NewAlerter(ctx context.Context, cfg AlerterConfig, nc *nats.Conn, m *Metrics, stack *run.Stack, log *slog.Logger) (*Alerter, error) {
	js, err := natsjs.New(nc)
	if err != nil {
		return nil, fmt.Errorf("open JetStream: %w", err)
	}
	declare := func(ctx context.Context) error { return natsx.Declare(ctx, js, natsx.Storage{}) }
	if nc.IsConnected() {
		if err := declare(ctx); err != nil {
			return nil, err
		}
	} else {
		stack.Go("streams", func(ctx context.Context) error { return declareLater(ctx, nc, declare, log) })
	}
	stack.Go("health", func(ctx context.Context) error {
		return sayHealth(ctx, schemas.PartAlerter, nc, func() []string { return nil }, log)
	})
	feed := natsfeed.New(natsfeed.Config{}, nc, js, alerting.New(cfg.Detector, m.alerting), log, m.alerting)
	if cfg.Webhook != "" {
		var secrets []conf.Secret
		for _, s := range strings.Fields(cfg.Secret.Reveal()) {
			secrets = append(secrets, conf.Secret(s))
		}
		to, err := webhook.New(webhook.Config{}, cfg.Webhook, secrets...)
		if err != nil {
			return nil, err
		}
		if len(secrets) == 0 {
			log.Warn("webhooks go out unsigned: set WEIR_WEBHOOK_SECRET or WEIR_WEBHOOK_SECRET_FILE")
		}
		feed.Direct(receiver, to)
		stack.Go("webhook", natsfeed.NewSender(natsfeed.SenderConfig{Name: receiver}, js, to, log, m.alerting).Run)
	}
	stack.Go("detectors", feed.Run)
	return &Alerter{nc: nc}, nil
}

// declareLater declares the streams once NATS is there.
func declareLater(ctx context.Context, nc *nats.Conn, declare func(context.Context) error, log *slog.Logger) error {
	for told := false; ; {
		if nc.IsConnected() {
			err := declare(ctx)
			if err == nil {
				return nil
			}
			if !told {
				told = true
				log.Error("streams are not declared, trying again until they are", "err", err)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
}

// Ready says whether the alerter hears anything.
func (a *Alerter) Ready() error {
	if !a.nc.IsConnected() {
		return fmt.Errorf("no connection to NATS")
	}
	return nil
}
